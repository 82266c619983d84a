#include "verbs/device.h"

#if ONESIDED_HAS_VERBS
#include <arpa/inet.h>
#include <limits.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <numeric>
#include <string_view>
#include <tuple>

namespace onesided::verbs {
namespace {

// ---- GIDs -----------------------------------------------------------------------------------------------------------

bool is_zero(const ibv_gid& gid) {
  return std::all_of(std::begin(gid.raw), std::end(gid.raw), [](std::uint8_t byte) { return byte == 0; });
}

bool is_mapped(const ibv_gid& gid) {
  return std::all_of(gid.raw, gid.raw + 10, [](std::uint8_t byte) { return byte == 0; }) && gid.raw[10] == 0xff &&
         gid.raw[11] == 0xff;
}

bool is_link_local(const ibv_gid& gid) {
  if (is_mapped(gid)) return gid.raw[12] == 169 && gid.raw[13] == 254;
  return gid.raw[0] == 0xfe && (gid.raw[1] & 0xc0) == 0x80;
}

bool is_loopback(const ibv_gid& gid) {
  if (is_mapped(gid)) return gid.raw[12] == 127;
  return std::all_of(gid.raw, gid.raw + 15, [](std::uint8_t byte) { return byte == 0; }) && gid.raw[15] == 1;
}

// By name too: seen from inside a container, sysfs does not always tell.
bool is_bridge(const NetworkInterface& interface) {
  static constexpr std::string_view kPrefixes[] = {"docker", "br-", "virbr", "cni", "lxcbr", "lxdbr", "podman"};
  return interface.is_bridge || std::any_of(std::begin(kPrefixes), std::end(kPrefixes), [&](std::string_view prefix) {
           return interface.name.starts_with(prefix);
         });
}

// Lower is better.
enum class Reach { Routable, LinkLocal, Version1 };

Reach reach(const Gid& gid, bool infiniband) {
  if (infiniband) return Reach::Routable;  // by LID within the subnet, whatever the GID says
  if (gid.type != IBV_GID_TYPE_ROCE_V2) return Reach::Version1;
  return is_link_local(gid.value) ? Reach::LinkLocal : Reach::Routable;
}

std::string shown(const Gid& gid, bool infiniband) {
  if (infiniband) return "InfiniBand";
  return text(gid.type_name(), is_link_local(gid.value) ? ", link-local address" : ", global address");
}

std::string listed(const std::vector<Gid>& gids) {
  std::string list;
  for (const Gid& gid : gids) {
    list += text(list.empty() ? "" : ", ", gid.index, " ", gid.address(), " (", gid.type_name(), ")");
  }
  return list.empty() ? "none" : list;
}

// ---- What sysfs and the codes of verbs say ----------------------------------------------------------------------------

std::string real_path(const std::string& path) {
  char resolved[PATH_MAX];
  return ::realpath(path.c_str(), resolved) != nullptr ? resolved : "";
}

bool exists(const std::string& path) {
  struct stat found{};
  return ::stat(path.c_str(), &found) == 0;
}

template <class Value>
Value read_or(const std::string& path, Value otherwise) {
  Value value{};
  return std::ifstream(path) >> value ? value : otherwise;
}

// Per lane, in Gb/s: the names SDR to NDR of the InfiniBand specification. Its later ones do not fit into 8 bits.
double lane_speed(unsigned code) {
  switch (code) {
    case 1: return 2.5;
    case 2: return 5;
    case 4: return 10;
    case 8: return 10;  // FDR10
    case 16: return 14;
    case 32: return 25;
    case 64: return 50;
    case 128: return 100;
    default: return 0;
  }
}

unsigned lanes(unsigned code) {
  switch (code) {
    case 1: return 1;
    case 2: return 4;
    case 4: return 8;
    case 8: return 12;
    case 16: return 2;
    default: return 0;
  }
}

const char* state_name(ibv_port_state state) {
  switch (state) {
    case IBV_PORT_NOP: return "NOP";
    case IBV_PORT_DOWN: return "DOWN";
    case IBV_PORT_INIT: return "INIT";
    case IBV_PORT_ARMED: return "ARMED";
    case IBV_PORT_ACTIVE: return "ACTIVE";
    case IBV_PORT_ACTIVE_DEFER: return "ACTIVE_DEFER";
  }
  return "unknown";
}

const char* atomics_name(const ibv_device_attr& limits) {
  return limits.atomic_cap == IBV_ATOMIC_NONE  ? "none"
         : limits.atomic_cap == IBV_ATOMIC_HCA ? "among its own"
                                               : "with the CPU's";
}

std::string errno_text(int error) {
  return error == 0 ? "the driver gives no reason" : text(std::strerror(error), " (errno ", error, ")");
}

// ---- One device -------------------------------------------------------------------------------------------------------

class DeviceList {
 public:
  DeviceList() : devices_(api().get_device_list(&count_)) {}
  ~DeviceList() {
    if (devices_ != nullptr) api().free_device_list(devices_);
  }
  DeviceList(const DeviceList&) = delete;
  DeviceList& operator=(const DeviceList&) = delete;

  ibv_device** begin() const { return devices_; }
  ibv_device** end() const { return devices_ == nullptr ? nullptr : devices_ + count_; }

 private:
  int count_ = 0;
  ibv_device** const devices_;
};

struct Closer {
  void operator()(ibv_context* context) const { api().close_device(context); }
};
using OpenContext = std::unique_ptr<ibv_context, Closer>;

std::string does_not_open(const ibv_device& device, int error) {
  // libibverbs reports a file that it may not open as one that is not there.
  const std::string file = text("/dev/infiniband/", device.dev_name);
  if (error == ENOENT && ::access(file.c_str(), F_OK) == 0 && ::access(file.c_str(), R_OK | W_OK) != 0) error = EACCES;
  std::string why = text("does not open: ", errno_text(error));
  if (error == EACCES || error == EPERM) {
    why += text("; this user needs read and write permission for ", file);
  } else if (error == ENOENT || error == ENODEV || error == ENXIO) {
    why += text("; a container needs ", file, " passed into it");
  }
  if (error == EMFILE) why += "; RLIMIT_NOFILE: raise it with ulimit -n";
  return why;
}

// All that is known without opening it.
Port blank(ibv_device& device) {
  Port port;
  port.device = api().get_device_name(&device);
  port.number = 0;
  const std::string sysfs(device.ibdev_path, ::strnlen(device.ibdev_path, sizeof device.ibdev_path));
  if (sysfs.empty()) return port;
  const std::string place = real_path(sysfs + "/device");
  // Only Soft-RoCE has the file `parent`; some kernels show it at the place of the NIC whose packets it uses.
  if (place.find("/pci") == std::string::npos || exists(sysfs + "/parent")) return port;
  port.pci_path = place;
  port.numa_node = read_or(place + "/numa_node", -1);
  return port;
}

// The entries of all ports. Empty, and `why` says so, if it cannot be read.
std::vector<ibv_gid_entry> gid_table(ibv_context* context, std::size_t most, std::string& why) {
  std::vector<ibv_gid_entry> entries(most);
  if (most == 0) return entries;
  const ssize_t count = api().query_gid_table(context, entries.data(), most, 0, sizeof(ibv_gid_entry));
  if (count < 0) why = text("the GID table cannot be read: ", errno_text(static_cast<int>(-count)));
  entries.resize(count < 0 ? 0 : std::min(most, static_cast<std::size_t>(count)));
  return entries;
}

void fill(Port& port, const ibv_port_attr& attr, const std::string& sysfs) {
  // Unspecified is what drivers from before RoCE say.
  port.link_layer = attr.link_layer == IBV_LINK_LAYER_ETHERNET ? "Ethernet" : "InfiniBand";
  port.state = state_name(attr.state);
  port.lid = attr.lid;
  port.active_mtu = attr.active_mtu;
  port.gigabits_per_second = lane_speed(attr.active_speed) * lanes(attr.active_width);
  if (port.gigabits_per_second == 0 && !sysfs.empty()) {
    port.gigabits_per_second = read_or(text(sysfs, "/ports/", unsigned{port.number}, "/rate"), 0.0);
  }
}

void decide(Port& port, const ibv_device& device, ibv_port_state state, const std::string& table_unread) {
  if (device.transport_type == IBV_TRANSPORT_IWARP) {
    port.unusable = "it is an iWARP device; those of InfiniBand and RoCE can be used";
  } else if (device.transport_type != IBV_TRANSPORT_IB) {
    port.unusable = "it has no reliable connections as InfiniBand and RoCE have them";
  } else if (state != IBV_PORT_ACTIVE) {
    port.unusable = text("port is ", port.state);
    if (port.link_layer == "InfiniBand" && (state == IBV_PORT_INIT || state == IBV_PORT_ARMED)) {
      port.unusable += ": its subnet manager has not made it active";
    }
  } else if (!table_unread.empty()) {
    port.unusable = table_unread;
  } else {
    GidChoice choice = choose_gid(port.link_layer, port.gids);
    port.gid = choice.gid;
    if (!port.gid) port.unusable = std::move(choice.why);
    port.pinnable = !port.gid && !port.gids.empty();
  }
}

void survey_device(ibv_device& device, std::vector<Port>& found) {
  const Port empty = blank(device);
  const auto give_up = [&](std::string why) {
    found.push_back(empty);
    found.back().unusable = std::move(why);
  };
  errno = 0;
  const OpenContext context(api().open_device(&device));
  if (context == nullptr) return give_up(does_not_open(device, errno));
  ibv_device_attr limits{};
  if (const int error = api().query_device(context.get(), &limits); error != 0) {
    return give_up(text("does not tell its limits: ", errno_text(error)));
  }
  if (limits.phys_port_cnt == 0) return give_up("has no port");

  const std::string sysfs(device.ibdev_path, ::strnlen(device.ibdev_path, sizeof device.ibdev_path));
  const std::size_t first = found.size();
  std::vector<ibv_port_attr> attrs(limits.phys_port_cnt);
  std::size_t entries = 0;
  for (unsigned i = 0; i < attrs.size(); ++i) {
    Port& port = found.emplace_back(empty);
    port.number = static_cast<std::uint8_t>(i + 1);
    port.limits = limits;
    if (const int error = api().query_port(context.get(), port.number, &attrs[i]); error != 0) {
      port.unusable = text("does not tell its state: ", errno_text(error));
      continue;
    }
    fill(port, attrs[i], sysfs);
    entries += static_cast<std::size_t>(std::max(attrs[i].gid_tbl_len, 0));
  }
  std::string table_unread;
  for (const ibv_gid_entry& entry : gid_table(context.get(), entries, table_unread)) {
    if (entry.port_num < 1 || entry.port_num > attrs.size() || is_zero(entry.gid)) continue;
    found[first + entry.port_num - 1].gids.push_back(
        {entry.gid, entry.gid_index, entry.gid_type, api().network_interface(entry.ndev_ifindex)});
  }
  for (unsigned i = 0; i < attrs.size(); ++i) {
    Port& port = found[first + i];
    std::sort(port.gids.begin(), port.gids.end(), [](const Gid& a, const Gid& b) { return a.index < b.index; });
    if (port.unusable.empty()) decide(port, device, attrs[i].state, table_unread);
  }
}

// ---- Pinned ports -----------------------------------------------------------------------------------------------------

// One entry of RailChoice::nics, taken apart.
struct Pin {
  std::string entry;
  std::string device;
  std::optional<unsigned> port;
  std::optional<unsigned> gid_index;
  std::optional<ibv_gid> address;

  bool names(const Port& candidate) const { return candidate.device == device && (!port || candidate.number == *port); }
};

template <class... Parts>
[[noreturn]] void fail_pin(const std::string& entry, const Parts&... parts) {
  fail(ErrorKind::Unsupported, "'", entry, "' of nics or ONESIDED_NICS: ", parts...);
}

std::optional<unsigned> to_number(std::string_view digits) {
  unsigned number = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  if (error != std::errc() || end != digits.data() + digits.size()) return std::nullopt;
  return number;
}

std::optional<ibv_gid> to_gid(const std::string& address) {
  ibv_gid gid{};
  if (::inet_pton(AF_INET6, address.c_str(), gid.raw) == 1) return gid;
  gid = {};
  if (::inet_pton(AF_INET, address.c_str(), gid.raw + 12) != 1) return std::nullopt;
  gid.raw[10] = gid.raw[11] = 0xff;
  return gid;
}

Pin parse(const std::string& entry) {
  Pin pin{entry, {}, {}, {}, {}};
  const std::size_t slash = entry.find('/');
  const std::string nic = entry.substr(0, slash);
  const std::size_t colon = nic.find(':');
  pin.device = nic.substr(0, colon);
  const char* const kForm = "write DEVICE, DEVICE:PORT or DEVICE:PORT/GID, the GID by index or by address";
  if (pin.device.empty()) fail_pin(entry, "it names no device; ", kForm);
  if (colon != std::string::npos) {
    pin.port = to_number(std::string_view(nic).substr(colon + 1));
    if (!pin.port || *pin.port == 0) fail_pin(entry, "its port is not a number from 1 on; ", kForm);
  }
  if (slash == std::string::npos) return pin;
  const std::string gid = entry.substr(slash + 1);
  pin.gid_index = to_number(gid);
  if (!pin.gid_index) pin.address = to_gid(gid);
  if (!pin.gid_index && !pin.address) fail_pin(entry, "'", gid, "' is neither an index nor an IP address; ", kForm);
  return pin;
}

std::optional<Gid> find(const Pin& pin, const Port& port) {
  if (!pin.gid_index && !pin.address) return choose_gid(port.link_layer, port.gids, true).gid;
  std::optional<Gid> found;
  for (const Gid& gid : port.gids) {
    const bool named = pin.gid_index ? gid.index == *pin.gid_index
                                     : std::equal(std::begin(gid.value.raw), std::end(gid.value.raw), pin.address->raw);
    // An address stands in the table once for each version of RoCE.
    if (named && (!found || gid.type > found->type)) found = gid;
  }
  return found;
}
static_assert(IBV_GID_TYPE_ROCE_V2 > IBV_GID_TYPE_ROCE_V1);

std::string names(const std::vector<Port>& ports) {
  std::string list;
  for (const Port& port : ports) list += text(list.empty() ? "" : ", ", port.name());
  return list.empty() ? "there is no RDMA device here" : "there are " + list;
}

std::vector<Verdict> judge_pinned(const std::vector<Port>& ports, const std::vector<std::string>& nics) {
  std::vector<Verdict> verdicts(ports.size(), {std::nullopt, "other ports are pinned"});
  std::vector<std::string> taken_by(ports.size());
  std::size_t rails = 0;
  for (const std::string& entry : nics) {
    const Pin pin = parse(entry);
    bool named = false, taken = false;
    std::string refused;
    for (std::size_t i = 0; i < ports.size(); ++i) {
      const Port& port = ports[i];
      // Also a device that does not open is named by "device:port".
      if (!pin.names(port) && !(port.number == 0 && port.device == pin.device)) continue;
      named = true;
      const std::string before = refused.empty() ? "" : "; ";
      if (!port.unusable.empty() && !port.pinnable) {
        verdicts[i].why = port.unusable;
        refused += text(before, port.name(), ": ", port.unusable);
        continue;
      }
      std::optional<Gid> gid = find(pin, port);
      if (!gid) {
        refused += text(before, port.name(), " has no such GID; its table has ", listed(port.gids));
        continue;
      }
      if (!taken_by[i].empty()) fail_pin(entry, port.name(), " is already pinned by '", taken_by[i], "'");
      taken_by[i] = entry;
      verdicts[i] = {gid, text(shown(*gid, port.link_layer == "InfiniBand"), ", pinned as '", entry, "'")};
      taken = true;
      if (++rails > kMostRails) fail_pin(entry, "it is one more than the ", kMostRails, " rails that can be used");
    }
    if (!named) fail_pin(entry, "there is no such port; ", names(ports));
    if (!taken) fail_pin(entry, refused);
  }
  return verdicts;
}

// ---- Choosing by merit ------------------------------------------------------------------------------------------------

// How many parts of the path two places in the PCI tree share.
std::size_t shared_depth(std::string_view a, std::string_view b) {
  std::size_t depth = 0;
  while (!a.empty() && !b.empty()) {
    const std::size_t end_a = std::min(a.find('/'), a.size()), end_b = std::min(b.find('/'), b.size());
    if (a.substr(0, end_a) != b.substr(0, end_b)) break;
    depth += end_a > 0;
    a.remove_prefix(std::min(end_a + 1, a.size()));
    b.remove_prefix(std::min(end_b + 1, b.size()));
  }
  return depth;
}

// The ports that are still in question; each step puts some out.
class Contest {
 public:
  Contest(const std::vector<Port>& ports, std::vector<Verdict>& verdicts) : ports_(ports), verdicts_(verdicts) {
    for (std::size_t i = 0; i < ports.size(); ++i) {
      if (ports[i].unusable.empty() && ports[i].gid) {
        left_.push_back(i);
      } else {
        verdicts[i].why = ports[i].unusable.empty() ? "no usable GID" : ports[i].unusable;
      }
    }
    usable_ = left_.size();
  }

  const std::vector<std::size_t>& left() const { return left_; }
  std::size_t usable() const { return usable_; }

  template <class Value>
  auto most(Value&& value) const {
    decltype(value(ports_[0])) best{};
    for (const std::size_t i : left_) best = std::max(best, value(ports_[i]));
    return best;
  }

  // Puts out those that are not good, with what `why` says of them, unless that would be all. True if it put any out.
  template <class Good, class Why>
  bool keep(Good&& good, Why&& why) {
    const auto is_good = [&](std::size_t i) { return good(ports_[i]); };
    if (std::none_of(left_.begin(), left_.end(), is_good)) return false;
    const std::size_t before = left_.size();
    for (const std::size_t i : left_) {
      if (!is_good(i)) verdicts_[i].why = why(ports_[i]);
    }
    std::erase_if(left_, [&](std::size_t i) { return !is_good(i); });
    return left_.size() < before;
  }

  void keep_first(std::size_t count, const std::string& why) {
    std::sort(left_.begin(), left_.end(), [&](std::size_t a, std::size_t b) { return before(ports_[a], ports_[b]); });
    while (left_.size() > count) {
      verdicts_[left_.back()].why = why;
      left_.pop_back();
    }
  }

  static bool before(const Port& a, const Port& b) {
    return std::tie(a.device, a.number) < std::tie(b.device, b.number);
  }

 private:
  const std::vector<Port>& ports_;
  std::vector<Verdict>& verdicts_;
  std::vector<std::size_t> left_;
  std::size_t usable_ = 0;
};

std::vector<Verdict> judge_by_merit(const std::vector<Port>& ports, const RailChoice& choice) {
  std::vector<Verdict> verdicts(ports.size());
  Contest contest(ports, verdicts);
  const auto infiniband = [](const Port& port) { return port.link_layer == "InfiniBand"; };

  contest.keep([](const Port& port) { return !port.pci_path.empty(); },
               [](const Port&) { return "a software device, and there are hardware ones"; });
  for (const Reach wanted : {Reach::Routable, Reach::LinkLocal}) {
    contest.keep([&](const Port& port) { return reach(*port.gid, infiniband(port)) <= wanted; },
                 [&](const Port& port) { return text(shown(*port.gid, infiniband(port)), ": others are routable"); });
  }

  bool nearest = false;
  if (choice.numa_node >= 0) {
    const auto same = [&](const Port& port) { return port.numa_node == choice.numa_node; };
    if (std::any_of(contest.left().begin(), contest.left().end(), [&](std::size_t i) { return same(ports[i]); })) {
      nearest |=
          contest.keep([&](const Port& port) { return port.numa_node < 0 || same(port); },
                       [&](const Port& port) {
                         return text("farther: on NUMA node ", port.numa_node, ", the memory on ", choice.numa_node);
                       });
    }
  }
  if (!choice.pci_path.empty()) {
    const auto depth = [&](const Port& port) { return shared_depth(port.pci_path, choice.pci_path); };
    const std::size_t deepest = contest.most(depth);
    nearest |= contest.keep([&](const Port& port) { return port.pci_path.empty() || depth(port) == deepest; },
                            [](const Port&) { return "farther in the PCI tree"; });
  }
  const double fastest = contest.most([](const Port& port) { return port.gigabits_per_second; });
  const bool faster = contest.keep(
      [&](const Port& port) { return port.gigabits_per_second >= 0.9 * fastest; },
      [&](const Port& port) { return text("slower: ", port.gigabits_per_second, " Gb/s, others have ", fastest); });
  contest.keep(infiniband, [](const Port&) { return "Ethernet, and there is InfiniBand"; });
  contest.keep_first(kMostRails, text(kMostRails, " rails are taken at most"));

  const std::string place = ports.size() == 1       ? "the only port"
                            : contest.usable() == 1 ? text("the only usable one of ", ports.size(), " ports")
                            : nearest               ? text("nearest of ", ports.size(), " ports")
                            : faster                ? text("fastest of ", ports.size(), " ports")
                                                    : text("best of ", ports.size(), " ports");
  for (const std::size_t i : contest.left()) {
    verdicts[i] = {ports[i].gid, text(shown(*ports[i].gid, infiniband(ports[i])), ", ", place)};
  }
  return verdicts;
}

}  // namespace

// ---- Gid, Port --------------------------------------------------------------------------------------------------------

std::string Gid::address() const {
  char shown[INET6_ADDRSTRLEN] = {};
  if (is_ipv4()) {
    ::inet_ntop(AF_INET, value.raw + 12, shown, sizeof shown);
  } else {
    ::inet_ntop(AF_INET6, value.raw, shown, sizeof shown);
  }
  return shown;
}

std::string Gid::type_name() const {
  return type == IBV_GID_TYPE_ROCE_V2 ? "RoCE v2" : type == IBV_GID_TYPE_ROCE_V1 ? "RoCE v1" : "IB";
}

bool Gid::is_ipv4() const {
  return is_mapped(value);
}

std::string Port::name() const {
  return number == 0 ? device : text(device, ":", unsigned{number});
}

GidChoice choose_gid(const std::string& link_layer, const std::vector<Gid>& gids, bool pinned) {
  const bool infiniband = link_layer == "InfiniBand";
  const Gid* best = nullptr;
  std::string inward;  // what was passed over, since it leads only into this host
  const auto rank = [&](const Gid& gid) {
    return std::tuple(reach(gid, infiniband), is_link_local(gid.value), !is_mapped(gid.value), gid.index);
  };
  for (const Gid& gid : gids) {
    if (is_zero(gid.value)) continue;
    if (!infiniband && !pinned && (is_loopback(gid.value) || is_bridge(gid.interface))) {
      inward = is_bridge(gid.interface) ? text(gid.interface.name, " is a bridge of containers or virtual machines")
                                        : text(gid.address(), " is a loopback address");
      continue;
    }
    if (best == nullptr || (infiniband ? gid.index < best->index : rank(gid) < rank(*best))) best = &gid;
  }
  if (best != nullptr) return {*best, shown(*best, infiniband)};
  if (inward.empty()) return {std::nullopt, "no usable GID: its table is empty (has the interface an address?)"};
  return {std::nullopt, text("no usable GID: ", inward, ", which leads only into this host; pin the port to use it")};
}

std::vector<Port> survey() {
  std::vector<Port> found;
  for (ibv_device* device : DeviceList()) survey_device(*device, found);
  return found;
}

// ---- Rails ------------------------------------------------------------------------------------------------------------

std::vector<Verdict> judge(const std::vector<Port>& ports, const RailChoice& choice) {
  return choice.nics.empty() ? judge_by_merit(ports, choice) : judge_pinned(ports, choice.nics);
}

std::vector<Rail> choose_rails(const std::vector<Port>& ports, const RailChoice& choice) {
  const std::vector<Verdict> verdicts = judge(ports, choice);
  std::vector<Rail> rails;
  std::string refused;
  for (std::size_t i = 0; i < ports.size(); ++i) {
    if (verdicts[i].gid) {
      rails.push_back({ports[i], *verdicts[i].gid, verdicts[i].why});
    } else {
      refused += text(refused.empty() ? "" : "; ", ports[i].name(), ": ", verdicts[i].why);
    }
  }
  if (ports.empty()) fail(ErrorKind::Unsupported, "there is no RDMA device here");
  if (rails.empty()) fail(ErrorKind::Unsupported, "no RDMA port can be used: ", refused);
  std::sort(rails.begin(), rails.end(), [](const Rail& a, const Rail& b) { return Contest::before(a.port, b.port); });
  return rails;
}

// ---- Device -----------------------------------------------------------------------------------------------------------

std::shared_ptr<Device> Device::open(const std::string& name) {
  std::shared_ptr<Device> opened(new Device(name));
  const DeviceList list;
  std::string others;
  for (ibv_device* device : list) {
    const std::string found = api().get_device_name(device);
    if (found != name) {
      others += text(others.empty() ? "" : ", ", found);
      continue;
    }
    errno = 0;
    opened->context_ = api().open_device(device);
    if (opened->context_ == nullptr) {
      fail(ErrorKind::Onesided, "RDMA device ", name, " ", does_not_open(*device, errno));
    }
    if (const int error = api().query_device(opened->context_, &opened->limits_); error != 0) {
      fail(ErrorKind::Onesided, "RDMA device ", name, " does not tell its limits: ", errno_text(error));
    }
    errno = 0;
    opened->pd_ = api().alloc_pd(opened->context_);
    if (opened->pd_ == nullptr) {
      fail(ErrorKind::Onesided, "RDMA device ", name, " gives no protection domain: ", errno_text(errno));
    }
    return opened;
  }
  fail(ErrorKind::Unsupported, "there is no RDMA device ", name, others.empty() ? "" : "; there are: ", others);
}

Device::~Device() {
  if (pd_ != nullptr) api().dealloc_pd(pd_);
  if (context_ != nullptr) api().close_device(context_);
}

// ---- For people -------------------------------------------------------------------------------------------------------

Description describe(const Port& port) {
  Description rows{{"port", port.name()}};
  if (port.number > 0 && !port.state.empty()) {
    rows.insert(rows.end(),
                {{"state", port.state},
                 {"link_layer", port.link_layer},
                 {"speed", port.gigabits_per_second > 0 ? text(port.gigabits_per_second, " Gb/s") : "unknown"},
                 {"mtu", std::to_string(128U << port.active_mtu)},
                 {"numa_node", port.numa_node < 0 ? "none" : std::to_string(port.numa_node)},
                 {"atomics", atomics_name(port.limits)}});
    if (port.link_layer == "InfiniBand") rows.emplace_back("lid", std::to_string(port.lid));
  }
  if (port.gid)
    rows.emplace_back("gid", text(port.gid->index, " ", port.gid->address(), " (", port.gid->type_name(), ")"));
  if (!port.unusable.empty()) rows.emplace_back("unusable", port.unusable);
  return rows;
}

Description describe(const Rail& rail) {
  Port port = rail.port;
  port.gid = rail.gid;
  port.unusable.clear();  // it was pinned all the same
  Description rows = describe(port);
  rows.emplace_back("why", rail.why);
  return rows;
}

}  // namespace onesided::verbs
#endif
