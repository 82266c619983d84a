#include "verbs/device.h"

#if ONESIDED_HAS_VERBS
#include <arpa/inet.h>

#include <algorithm>
#include <cerrno>

#include "tests/fake_verbs.h"
#include "tests/support.h"

namespace onesided::tests {
namespace {

using verbs::Gid;
using verbs::Port;

ibv_gid to_gid(const std::string& address) {
  ibv_gid gid{};
  if (::inet_pton(AF_INET6, address.c_str(), gid.raw) == 1) return gid;
  gid = {};
  gid.raw[10] = gid.raw[11] = 0xff;
  REQUIRE(::inet_pton(AF_INET, address.c_str(), gid.raw + 12) == 1);
  return gid;
}

Gid v1(std::uint32_t index, const std::string& address, const std::string& interface = "eth0") {
  return {to_gid(address), index, IBV_GID_TYPE_ROCE_V1, {interface}};
}
Gid v2(std::uint32_t index, const std::string& address, const std::string& interface = "eth0") {
  return {to_gid(address), index, IBV_GID_TYPE_ROCE_V2, {interface}};
}
Gid hole(std::uint32_t index) {
  return {{}, index, IBV_GID_TYPE_ROCE_V2, {}};
}

std::string chosen(const std::vector<Gid>& gids, bool pinned = false, const std::string& link_layer = "Ethernet") {
  const auto choice = verbs::choose_gid(link_layer, gids, pinned);
  return choice.gid ? text(choice.gid->index, " ", choice.gid->address()) : choice.why;
}

TEST_CASE("device: of a GID table, a routable RoCE v2 entry is chosen") {
  const Gid link_local_1 = v1(0, "fe80::1"), link_local_2 = v2(1, "fe80::1");
  const Gid ipv4_1 = v1(2, "10.0.0.7"), ipv4_2 = v2(3, "10.0.0.7");
  const Gid ipv6_1 = v1(4, "2001:db8::7"), ipv6_2 = v2(5, "2001:db8::7");

  CHECK(chosen({link_local_1, link_local_2, ipv4_1, ipv4_2, ipv6_1, ipv6_2}) == "3 10.0.0.7");
  CHECK(chosen({ipv6_2, ipv6_1, ipv4_2, ipv4_1, link_local_2, link_local_1}) == "3 10.0.0.7");
  CHECK(chosen({link_local_1, link_local_2, ipv4_1, ipv6_1, ipv6_2}) == "5 2001:db8::7");
  // A version 1 address is reached within its Ethernet only, and so is a link-local one.
  CHECK(chosen({link_local_1, link_local_2, ipv4_1, ipv6_1}) == "1 fe80::1");
  CHECK(chosen({link_local_1, ipv4_1, ipv6_1}) == "2 10.0.0.7");
  CHECK(chosen({link_local_1, ipv6_1}) == "4 2001:db8::7");
  CHECK(chosen({link_local_1}) == "0 fe80::1");
  // IPv4 has link-local addresses too.
  CHECK(chosen({v2(1, "169.254.3.3"), ipv6_2}) == "5 2001:db8::7");
  CHECK(chosen({v2(1, "fe80::1"), v2(2, "169.254.3.3")}) == "2 169.254.3.3");
  // Holes are no addresses, and do not count as the first entry.
  CHECK(chosen({hole(0), hole(1), ipv4_2, hole(4)}) == "3 10.0.0.7");
  CHECK(chosen({v2(7, "10.0.0.9"), hole(3), v2(5, "10.0.0.8")}) == "5 10.0.0.8");
  CHECK(contains(chosen({hole(0), hole(1)}), "no usable GID: its table is empty"));
  CHECK(contains(chosen({}), "no usable GID: its table is empty"));

  CHECK(verbs::choose_gid("Ethernet", {ipv4_2}).why == "RoCE v2, global address");
  CHECK(verbs::choose_gid("Ethernet", {link_local_1}).why == "RoCE v1, link-local address");
}

TEST_CASE("device: addresses that lead only into this host are taken when pinned only") {
  for (const char* bridge : {"docker0", "docker_gwbridge", "br-1a2b3c4d5e6f", "virbr0", "cni0", "lxcbr0", "podman1"}) {
    CAPTURE(bridge);
    CHECK(contains(chosen({v2(1, "172.17.0.1", bridge)}), text("no usable GID: ", bridge, " is a bridge")));
    CHECK(chosen({v2(1, "172.17.0.1", bridge), v1(2, "fe80::1")}) == "2 fe80::1");
    CHECK(chosen({v2(1, "172.17.0.1", bridge)}, true) == "1 172.17.0.1");
  }
  Gid bridged = v2(1, "10.1.0.1", "lan");
  CHECK(chosen({bridged}) == "1 10.1.0.1");
  bridged.interface.is_bridge = true;
  CHECK(contains(chosen({bridged}), "no usable GID: lan is a bridge"));
  CHECK(chosen({v2(1, "10.1.0.1", "bridgeport0")}) == "1 10.1.0.1");
  for (const char* loopback : {"127.0.0.1", "127.8.0.1", "::1"}) {
    CHECK(contains(chosen({v2(0, loopback, "lo")}), text("no usable GID: ", loopback, " is a loopback address")));
    CHECK(contains(chosen({v2(0, loopback, "lo")}, true), loopback));
  }
}

TEST_CASE("device: InfiniBand takes the first entry") {
  Gid first = v2(0, "fe80::2:c903:1:2", ""), second = v2(1, "2001:db8::2", "");
  first.type = second.type = IBV_GID_TYPE_IB;
  CHECK(chosen({second, first}, false, "InfiniBand") == "0 fe80::2:c903:1:2");
  CHECK(chosen({hole(0), second}, false, "InfiniBand") == "1 2001:db8::2");
  CHECK(verbs::choose_gid("InfiniBand", {first}).why == "InfiniBand");
  CHECK(first.type_name() == "IB");
  CHECK(v1(0, "::2").type_name() == "RoCE v1");
  CHECK(v2(0, "::2").type_name() == "RoCE v2");
}

TEST_CASE("device: addresses are shown as people write them") {
  CHECK(v2(0, "10.77.0.1").address() == "10.77.0.1");
  CHECK(v2(0, "10.77.0.1").is_ipv4());
  CHECK(v2(0, "2001:db8:0:0:0:0:0:7").address() == "2001:db8::7");
  CHECK_FALSE(v2(0, "2001:db8::7").is_ipv4());
}

// ---- Which ports ------------------------------------------------------------------------------------------------------

Port port(const std::string& device, std::vector<Gid> gids = {v2(3, "10.0.0.7")}, double speed = 100) {
  Port made;
  made.device = device;
  made.link_layer = "Ethernet";
  made.state = "ACTIVE";
  made.gigabits_per_second = speed;
  made.pci_path = "/sys/devices/pci0000:00/0000:00:01.0/" + device;
  made.gids = std::move(gids);
  auto choice = verbs::choose_gid(made.link_layer, made.gids);
  made.gid = choice.gid;
  if (!made.gid) made.unusable = choice.why;
  made.pinnable = !made.gid && !made.gids.empty();
  return made;
}
Port infiniband(const std::string& device, double speed) {
  Port made = port(device, {v2(0, "fe80::9")}, speed);
  made.link_layer = "InfiniBand";
  made.gids[0].type = made.gid->type = IBV_GID_TYPE_IB;
  return made;
}
Port broken(const std::string& device, const std::string& why) {
  Port made = port(device);
  made.gid.reset();
  made.unusable = why;
  return made;
}
Port closed(const std::string& device) {
  Port made = broken(device, "does not open: Permission denied (errno 13)");
  made.number = 0;
  made.state.clear();
  made.gids.clear();
  return made;
}
Port at(Port made, int numa_node, const std::string& pci_path = "") {
  made.numa_node = numa_node;
  if (!pci_path.empty()) made.pci_path = pci_path;
  return made;
}
Port software(Port made) {
  made.pci_path.clear();
  return made;
}

std::string rails(const std::vector<Port>& ports, const verbs::RailChoice& choice = {}) {
  std::string names;
  for (const auto& rail : verbs::choose_rails(ports, choice)) {
    names += text(names.empty() ? "" : " ", rail.port.name(), "/", rail.gid.index);
  }
  return names;
}
std::string pinned(const std::vector<Port>& ports, std::vector<std::string> nics) {
  return rails(ports, {.nics = std::move(nics), .numa_node = -1, .pci_path = {}});
}
std::string refusal(const std::vector<Port>& ports, std::vector<std::string> nics = {}) {
  const verbs::RailChoice choice{.nics = std::move(nics), .numa_node = -1, .pci_path = {}};
  CHECK(raised([&] { verbs::choose_rails(ports, choice); }) == "Unsupported");
  return said([&] { verbs::choose_rails(ports, choice); });
}
std::vector<std::string> whys(const std::vector<Port>& ports, const verbs::RailChoice& choice = {}) {
  std::vector<std::string> all;
  for (const auto& verdict : verbs::judge(ports, choice)) all.push_back((verdict.gid ? "+" : "-") + verdict.why);
  return all;
}
using Whys = std::vector<std::string>;

TEST_CASE("device: where no port can be used, each is named with its reason") {
  CHECK(refusal({}) == "there is no RDMA device here");
  CHECK(refusal({broken("mlx5_0", "port is DOWN")}) == "no RDMA port can be used: mlx5_0:1: port is DOWN");
  CHECK(refusal({closed("mlx5_0")}) == "no RDMA port can be used: mlx5_0: does not open: Permission denied (errno 13)");
  const std::string all =
      refusal({broken("mlx5_0", "port is DOWN"), closed("mlx5_1"), port("rxe0", {v2(1, "172.17.0.1", "docker0")})});
  CHECK(contains(all, "mlx5_0:1: port is DOWN; mlx5_1: does not open"));
  CHECK(contains(all, "rxe0:1: no usable GID: docker0 is a bridge of containers"));
}

TEST_CASE("device: of several devices the usable ones are taken") {
  CHECK(rails({broken("mlx5_0", "port is DOWN"), port("mlx5_1"), closed("mlx5_2")}) == "mlx5_1:1/3");
  CHECK(whys({broken("mlx5_0", "port is DOWN"), port("mlx5_1")}) ==
        Whys{"-port is DOWN", "+RoCE v2, global address, the only usable one of 2 ports"});
  CHECK(whys({port("mlx5_0")}) == Whys{"+RoCE v2, global address, the only port"});
  CHECK(rails({port("mlx5_2"), port("mlx5_0"), port("mlx5_1")}) == "mlx5_0:1/3 mlx5_1:1/3 mlx5_2:1/3");
}

TEST_CASE("device: hardware comes before software, and what is routable before what is not") {
  CHECK(rails({software(port("rxe0")), port("mlx5_0", {v2(3, "10.0.0.7")}, 25)}) == "mlx5_0:1/3");
  CHECK(rails({software(port("rxe0")), broken("mlx5_0", "port is DOWN")}) == "rxe0:1/3");
  CHECK(rails({software(port("rxe0")), software(port("rxe1"))}) == "rxe0:1/3 rxe1:1/3");
  const Port local = port("mlx5_0", {v2(1, "fe80::1")}, 400), old = port("mlx5_1", {v1(2, "10.0.0.7")}, 400);
  CHECK(rails({local, old, port("mlx5_2")}) == "mlx5_2:1/3");
  CHECK(rails({old, local}) == "mlx5_0:1/1");
  CHECK(rails({old}) == "mlx5_1:1/2");
  CHECK(whys({local, port("mlx5_2")})[0] == "-RoCE v2, link-local address: others are routable");
}

TEST_CASE("device: the nearest are taken, and a port whose place is unknown is as near as they") {
  const Port here = at(port("a"), 0), there = at(port("b"), 1), somewhere = port("c");
  verbs::RailChoice on_0{.nics = {}, .numa_node = 0, .pci_path = {}};
  CHECK(rails({here, there, somewhere}, on_0) == "a:1/3 c:1/3");
  CHECK(rails({there, somewhere}, on_0) == "b:1/3 c:1/3");
  CHECK(rails({here, there}) == "a:1/3 b:1/3");
  CHECK(whys({here, there}, on_0) ==
        Whys{"+RoCE v2, global address, nearest of 2 ports", "-farther: on NUMA node 1, the memory on 0"});
  // A far port is still better than none.
  CHECK(rails({broken("a", "port is DOWN"), there}, on_0) == "b:1/3");

  const std::string root = "/sys/devices/pci0000:17/", other = "/sys/devices/pci0000:b0/";
  const std::vector<Port> ports{at(port("a"), 0, root + "0000:17:01.0/0000:18:00.0/0000:19:00.0"),
                                at(port("b"), 0, root + "0000:17:01.0/0000:18:00.0/0000:19:01.0"),
                                at(port("c"), 0, root + "0000:17:03.0/0000:2a:00.0"),
                                at(port("d"), 1, other + "0000:b0:01.0/0000:b1:00.0")};
  const auto near_to = [](std::string path) {
    return verbs::RailChoice{.nics = {}, .numa_node = -1, .pci_path = std::move(path)};
  };
  CHECK(rails(ports, near_to(root + "0000:17:01.0/0000:18:00.0/0000:19:02.0")) == "a:1/3 b:1/3");
  CHECK(rails(ports, near_to(root + "0000:17:05.0")) == "a:1/3 b:1/3 c:1/3");
  CHECK(rails(ports, near_to(other + "0000:b0:05.0/0000:c0:00.0")) == "d:1/3");
  CHECK(rails(ports, near_to("/sys/devices/pci0000:ff/0000:ff:00.0")) == "a:1/3 b:1/3 c:1/3 d:1/3");
  CHECK(whys(ports, near_to(other + "0000:b0:05.0"))[0] == "-farther in the PCI tree");
  // Near comes before fast.
  CHECK(rails({at(port("a", {v2(3, "10.0.0.7")}, 25), 0), at(port("b"), 1)}, on_0) == "a:1/3");
}

TEST_CASE("device: rails are of about one speed, of one link layer, and not too many") {
  const auto of = [](const char* name, double speed) { return port(name, {v2(3, "10.0.0.7")}, speed); };
  CHECK(rails({of("a", 100), of("b", 90), of("c", 89)}) == "a:1/3 b:1/3");
  CHECK(whys({of("a", 100), of("b", 25)}) ==
        Whys{"+RoCE v2, global address, fastest of 2 ports", "-slower: 25 Gb/s, others have 100"});
  CHECK(rails({of("a", 0), of("b", 0)}) == "a:1/3 b:1/3");
  CHECK(rails({of("a", 0), of("b", 10)}) == "b:1/3");
  CHECK(rails({infiniband("mlx5_0", 200), of("mlx5_1", 200)}) == "mlx5_0:1/0");
  CHECK(rails({infiniband("mlx5_0", 100), of("mlx5_1", 200)}) == "mlx5_1:1/3");
  CHECK(whys({infiniband("mlx5_0", 200), of("mlx5_1", 200)})[1] == "-Ethernet, and there is InfiniBand");

  std::vector<Port> many;
  for (char name = 'k'; name >= 'a'; --name) many.push_back(port({name}));
  CHECK(verbs::choose_rails(many, {}).size() == verbs::kMostRails);
  CHECK(verbs::choose_rails(many, {}).back().port.device == "h");
  CHECK(whys(many)[0] == "-8 rails are taken at most");
}

// ---- Pinned -----------------------------------------------------------------------------------------------------------

std::vector<Port> some_ports() {
  Port second = port("mlx5_1", {v1(0, "fe80::1"), v2(1, "fe80::1"), v1(2, "10.0.0.8"), v2(3, "10.0.0.8")}, 25);
  Port far_side = second;
  far_side.number = 2;
  far_side.gids = {v2(1, "fe80::2"), v2(3, "10.0.1.8")};
  far_side.gid = far_side.gids[1];
  Port bridged = port("rxe0", {v2(1, "172.17.0.1", "docker0")});
  return {port("mlx5_0"), second, far_side, broken("mlx5_2", "port is DOWN"), closed("mlx5_3"), bridged};
}

TEST_CASE("device: ports and GIDs can be pinned") {
  const auto ports = some_ports();
  CHECK(rails(ports) == "mlx5_0:1/3");
  CHECK(pinned(ports, {"mlx5_0"}) == "mlx5_0:1/3");
  CHECK(pinned(ports, {"mlx5_1"}) == "mlx5_1:1/3 mlx5_1:2/3");
  CHECK(pinned(ports, {"mlx5_1:2"}) == "mlx5_1:2/3");
  CHECK(pinned(ports, {"mlx5_1:2", "mlx5_0", "mlx5_1:1"}) == "mlx5_0:1/3 mlx5_1:1/3 mlx5_1:2/3");
  CHECK(pinned(ports, {"mlx5_1:1/0"}) == "mlx5_1:1/0");
  CHECK(pinned(ports, {"mlx5_1:1/2"}) == "mlx5_1:1/2");
  // Of an address that is there for both versions, version 2.
  CHECK(pinned(ports, {"mlx5_1:1/10.0.0.8"}) == "mlx5_1:1/3");
  CHECK(pinned(ports, {"mlx5_1:1/::ffff:10.0.0.8"}) == "mlx5_1:1/3");
  CHECK(pinned(ports, {"mlx5_1:1/fe80:0::1"}) == "mlx5_1:1/1");
  CHECK(pinned(ports, {"mlx5_1/10.0.1.8"}) == "mlx5_1:2/3");
  CHECK(pinned(ports, {"rxe0"}) == "rxe0:1/1");
  CHECK(whys(ports, {.nics = {"mlx5_1:1/0"}, .numa_node = -1, .pci_path = {}})[1] ==
        "+RoCE v1, link-local address, pinned as 'mlx5_1:1/0'");
}

TEST_CASE("device: a wrong entry is named, with what there is") {
  const auto ports = some_ports();
  CHECK(refusal(ports, {"mlx5_0", "mlx5_9"}) ==
        "'mlx5_9' of nics or ONESIDED_NICS: there is no such port; there are mlx5_0:1, mlx5_1:1, mlx5_1:2, mlx5_2:1, "
        "mlx5_3, rxe0:1");
  CHECK(contains(refusal(ports, {"mlx5_1:3"}), "'mlx5_1:3' of nics or ONESIDED_NICS: there is no such port"));
  CHECK(refusal({}, {"mlx5_0"}) ==
        "'mlx5_0' of nics or ONESIDED_NICS: there is no such port; there is no RDMA device here");
  CHECK(refusal(ports, {"mlx5_2"}) == "'mlx5_2' of nics or ONESIDED_NICS: mlx5_2:1: port is DOWN");
  CHECK(contains(refusal(ports, {"mlx5_3:1"}), "'mlx5_3:1' of nics or ONESIDED_NICS: mlx5_3: does not open"));
  CHECK(refusal(ports, {"mlx5_1:1/7"}) ==
        "'mlx5_1:1/7' of nics or ONESIDED_NICS: mlx5_1:1 has no such GID; its table has 0 fe80::1 (RoCE v1), 1 fe80::1 "
        "(RoCE v2), "
        "2 10.0.0.8 (RoCE v1), 3 10.0.0.8 (RoCE v2)");
  CHECK(
      contains(refusal(ports, {"mlx5_0:1/10.0.0.8"}), "mlx5_0:1 has no such GID; its table has 3 10.0.0.7 (RoCE v2)"));
  CHECK(contains(refusal(ports, {"mlx5_1:1", "mlx5_1"}),
                 "'mlx5_1' of nics or ONESIDED_NICS: mlx5_1:1 is already pinned by 'mlx5_1:1'"));
  for (const char* entry : {"", ":1", "/3", "mlx5_0:", "mlx5_0:0", "mlx5_0:x", "mlx5_0:1:1", "mlx5_0:-1",
                            "mlx5_0:99999999999", "mlx5_0:1/", "mlx5_0:1/eth0", "mlx5_0:1/10.0.0", "mlx5_0:1/3/3"}) {
    CAPTURE(entry);
    const std::string refused = refusal(ports, {entry});
    CHECK(contains(refused, text("'", entry, "' of nics or ONESIDED_NICS")));
    CHECK(contains(refused, "write DEVICE, DEVICE:PORT or DEVICE:PORT/GID"));
  }
  std::vector<Port> many;
  std::vector<std::string> all;
  for (char name = 'a'; name <= 'i'; ++name) {
    many.push_back(port({name}));
    all.push_back({name});
  }
  CHECK(contains(refusal(many, all), "'i' of nics or ONESIDED_NICS: it is one more than the 8 rails"));
}

TEST_CASE("device: a port and a rail describe themselves") {
  const auto row = [](const Description& rows, const std::string& name) {
    for (const auto& [key, value] : rows) {
      if (key == name) return value;
    }
    return std::string("(none)");
  };
  const auto ports = some_ports();
  const auto described = verbs::describe(verbs::choose_rails(ports, {})[0]);
  CHECK(row(described, "port") == "mlx5_0:1");
  CHECK(row(described, "gid") == "3 10.0.0.7 (RoCE v2)");
  CHECK(row(described, "speed") == "100 Gb/s");
  CHECK(row(described, "mtu") == "1024");
  CHECK(contains(row(described, "why"), "RoCE v2, global address"));
  CHECK(row(verbs::describe(ports[3]), "unusable") == "port is DOWN");
  CHECK(row(verbs::describe(ports[4]), "port") == "mlx5_3");
  CHECK(row(verbs::describe(ports[4]), "state") == "(none)");
  CHECK(row(verbs::describe(infiniband("a", 1)), "lid") == "0");
}

// ---- What devices say -------------------------------------------------------------------------------------------------

const Port& named(const std::vector<Port>& ports, const std::string& name) {
  const auto found = std::find_if(ports.begin(), ports.end(), [&](const Port& port) { return port.name() == name; });
  REQUIRE(found != ports.end());
  return *found;
}

TEST_CASE("device: a survey tells what the devices tell") {
  fake::Machine machine = fake::default_machine(2);
  fake::Device& second = machine.devices[1];
  second.numa_node = 1;
  second.limits.atomic_cap = IBV_ATOMIC_NONE;
  second.ports.emplace_back();
  second.ports[1].link_layer = IBV_LINK_LAYER_INFINIBAND;
  second.ports[1].lid = 17;
  second.ports[1].active_speed = 128;
  second.ports[1].active_mtu = IBV_MTU_2048;
  second.ports[1].gids = {{"fe80::b859:9fff:fe00:1", 0, IBV_GID_TYPE_IB, ""}};
  const fake::InUse in_use(machine);

  const auto ports = verbs::survey();
  CHECK(fake::live().total() == 0);
  REQUIRE(ports.size() == 3);
  const Port& first = named(ports, "fake0:1");
  CHECK(first.link_layer == "Ethernet");
  CHECK(first.state == "ACTIVE");
  CHECK(first.active_mtu == IBV_MTU_4096);
  CHECK(first.gigabits_per_second == 100);
  CHECK(first.numa_node == 0);
  CHECK(contains(first.pci_path, "/pci0000:00/0000:00:01.0/"));
  CHECK(first.limits.max_qp_rd_atom == 16);
  REQUIRE(first.gids.size() == 4);
  CHECK(first.gids[3].address() == "10.77.0.1");
  CHECK(first.gids[3].interface.name == "eth0");
  REQUIRE(first.gid);
  CHECK(first.gid->index == 3);
  CHECK(first.unusable.empty());

  const Port& infiniband = named(ports, "fake1:2");
  CHECK(infiniband.link_layer == "InfiniBand");
  CHECK(infiniband.lid == 17);
  CHECK(infiniband.gigabits_per_second == 400);
  CHECK(infiniband.active_mtu == IBV_MTU_2048);
  CHECK(infiniband.numa_node == 1);
  CHECK(infiniband.unusable.empty());  // without atomics too
  REQUIRE(infiniband.gid);
  CHECK(infiniband.gid->index == 0);
  CHECK(rails(ports) == "fake1:2/0");
  CHECK(rails(ports, {.nics = {}, .numa_node = 0, .pci_path = {}}) == "fake0:1/3");
}

TEST_CASE("device: speeds are those of the link") {
  struct Row {
    std::uint8_t speed, width;
    double expected;
  };
  for (const Row& row : std::vector<Row>{{1, 1, 2.5},
                                         {1, 2, 10},
                                         {2, 2, 20},
                                         {4, 2, 40},
                                         {8, 2, 40},
                                         {16, 2, 56},
                                         {32, 1, 25},
                                         {32, 2, 100},
                                         {64, 16, 100},
                                         {64, 2, 200},
                                         {128, 2, 400},
                                         {128, 4, 800},
                                         {32, 8, 300},
                                         {0, 2, 0},
                                         {32, 0, 0}}) {
    fake::Machine machine = fake::default_machine(1);
    machine.devices[0].ports[0].active_speed = row.speed;
    machine.devices[0].ports[0].active_width = row.width;
    const fake::InUse in_use(machine);
    CAPTURE(unsigned{row.speed});
    CAPTURE(unsigned{row.width});
    CHECK(verbs::survey()[0].gigabits_per_second == row.expected);
  }
}

TEST_CASE("device: none, one that is down, one that does not open, several of which one is unusable") {
  {
    const fake::InUse in_use(fake::Machine{});
    CHECK(verbs::survey().empty());
    CHECK(refusal(verbs::survey()) == "there is no RDMA device here");
  }
  fake::Machine machine = fake::default_machine(4);
  machine.devices[0].ports[0].state = IBV_PORT_DOWN;
  machine.devices[1].open_fails = EACCES;
  machine.devices[2].open_fails = EIO;
  machine.devices[3].ports.clear();
  {
    const fake::InUse in_use(machine);
    const auto ports = verbs::survey();
    CHECK(named(ports, "fake0:1").unusable == "port is DOWN");
    CHECK_FALSE(named(ports, "fake0:1").gid);
    CHECK(named(ports, "fake0:1").gids.size() == 4);
    CHECK(named(ports, "fake1").unusable ==
          "does not open: Permission denied (errno 13); this user needs read and write permission for "
          "/dev/infiniband/uverbs1");
    CHECK(named(ports, "fake1").numa_node == 0);
    CHECK(named(ports, "fake2").unusable == "does not open: Input/output error (errno 5)");
    CHECK(named(ports, "fake3").unusable == "has no port");
    const std::string all = refusal(ports);
    for (const char* name :
         {"fake0:1: port is DOWN", "fake1: does not open", "fake2: does not", "fake3: has no port"}) {
      CHECK(contains(all, name));
    }
    CHECK(contains(refusal(ports, {"fake1:1"}), "'fake1:1' of nics or ONESIDED_NICS: fake1: does not open"));
  }
  for (const unsigned healthy : {0U, 1U, 2U, 3U}) {
    fake::Machine one_works = machine;
    one_works.devices[healthy] = fake::default_device(healthy);
    const fake::InUse in_use(one_works);
    CHECK(rails(verbs::survey()) == text("fake", healthy, ":1/3"));
    CHECK(contains(verbs::choose_rails(verbs::survey(), {})[0].why, "the only usable one of 4 ports"));
  }
  for (const auto& [state, why] :
       {std::pair(IBV_PORT_INIT, "port is INIT: its subnet manager"),
        std::pair(IBV_PORT_ARMED, "port is ARMED: its subnet manager"), std::pair(IBV_PORT_DOWN, "port is DOWN")}) {
    fake::Machine infiniband = fake::default_machine(1);
    infiniband.devices[0].ports[0].link_layer = IBV_LINK_LAYER_INFINIBAND;
    infiniband.devices[0].ports[0].state = state;
    const fake::InUse in_use(infiniband);
    CHECK(contains(refusal(verbs::survey()), why));
  }
}

TEST_CASE("device: a failure of one device costs no other") {
  for (const auto& [call, why] : {std::pair(fake::Call::OpenDevice, "does not open"),
                                  std::pair(fake::Call::QueryDevice, "does not tell its limits"),
                                  std::pair(fake::Call::QueryPort, "does not tell its state"),
                                  std::pair(fake::Call::QueryGidTable, "the GID table cannot be read")}) {
    CAPTURE(why);
    const fake::InUse in_use;
    fake::fail(call, EIO);
    const auto ports = verbs::survey();
    REQUIRE(ports.size() == 2);
    CHECK(ports[0].unusable == text(why, ": Input/output error (errno 5)"));
    CHECK(ports[1].unusable.empty());
    CHECK(rails(ports) == "fake1:1/3");
    CHECK(fake::live().total() == 0);
  }
}

TEST_CASE("device: GID tables with holes, bridges and nothing in them") {
  fake::Machine machine = fake::default_machine(4);
  machine.devices[0].ports[0].gids = {{"fe80::1", 2}, {"2001:db8::7", 200}, {"10.0.0.7", 7, IBV_GID_TYPE_ROCE_V1}};
  machine.devices[1].ports[0].gids = {{"172.17.0.1", 1, IBV_GID_TYPE_ROCE_V2, "docker0"}};
  machine.devices[2].ports[0].gids = {{"10.1.0.1", 1, IBV_GID_TYPE_ROCE_V2, "lan", true}};
  machine.devices[3].ports[0].gids = {};
  const fake::InUse in_use(machine);
  const auto ports = verbs::survey();
  CHECK(rails(ports) == "fake0:1/200");
  CHECK(contains(named(ports, "fake1:1").unusable, "docker0 is a bridge"));
  CHECK(contains(named(ports, "fake2:1").unusable, "lan is a bridge"));
  CHECK(contains(named(ports, "fake3:1").unusable, "no usable GID: its table is empty"));
  CHECK(pinned(ports, {"fake1:1"}) == "fake1:1/1");
  CHECK(pinned(ports, {"fake2:1/10.1.0.1", "fake1"}) == "fake1:1/1 fake2:1/1");
  CHECK(contains(refusal(ports, {"fake3"}), "no usable GID"));
}

TEST_CASE("device: a software device has no place, and gives way to hardware") {
  fake::Machine machine = fake::default_machine(2);
  machine.devices[0].pci_path.clear();
  machine.devices[0].numa_node = -1;
  const fake::InUse in_use(machine);
  const auto ports = verbs::survey();
  CHECK(named(ports, "fake0:1").pci_path == "");
  CHECK(named(ports, "fake0:1").numa_node == -1);
  CHECK(rails(ports) == "fake1:1/3");
}

TEST_CASE("device: opened and closed, with all that belongs to it") {
  const fake::InUse in_use;
  {
    const auto device = verbs::Device::open("fake1");
    CHECK(device->name() == "fake1");
    CHECK(device->context() != nullptr);
    CHECK(device->pd() != nullptr);
    CHECK(device->limits().max_qp_wr == 8192);
    CHECK(fake::live().contexts == 1);
    CHECK(fake::live().pds == 1);
    CHECK(fake::live().device_lists == 0);
  }
  CHECK(fake::live().total() == 0);

  const auto open = [](const char* name) { return [=] { verbs::Device::open(name); }; };
  CHECK(raised(open("fake9")) == "Unsupported");
  CHECK(said(open("fake9")) == "there is no RDMA device fake9; there are: fake0, fake1");
  for (const auto& [call, why] : {std::pair(fake::Call::OpenDevice, "does not open"),
                                  std::pair(fake::Call::QueryDevice, "does not tell its limits"),
                                  std::pair(fake::Call::AllocPd, "gives no protection domain")}) {
    fake::fail(call, ENOMEM);
    CHECK(said(open("fake0")) == text("RDMA device fake0 ", why, ": Cannot allocate memory (errno 12)"));
    fake::fail(call, ENOMEM);
    CHECK(raised(open("fake0")) == "Onesided");
    CHECK(fake::live().total() == 0);
  }
}

TEST_CASE("device: one that is gone since the survey") {
  fake::Machine machine = fake::default_machine(2);
  machine.devices[0].vanishes = true;
  const fake::InUse in_use(machine);
  CHECK(contains(named(verbs::survey(), "fake0").unusable, "does not open: No such device"));
  CHECK(raised([] { verbs::Device::open("fake0"); }) == "Unsupported");
}

}  // namespace
}  // namespace onesided::tests
#endif
