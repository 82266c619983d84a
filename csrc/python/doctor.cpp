#include <nanobind/stl/vector.h>

#include <cstring>
#include <string>
#include <vector>

#include "python/common.h"
#include "verbs/device.h"

namespace onesided::python {
namespace {

#if ONESIDED_HAS_VERBS
nb::dict to_dict(const verbs::Gid& gid) {
  nb::dict entry;
  entry["index"] = gid.index;
  entry["address"] = gid.address();
  entry["type"] = gid.type_name();
  entry["interface"] = gid.interface.name;
  return entry;
}

nb::dict to_dict(const verbs::Port& port, const verbs::Verdict& verdict) {
  nb::list gids;
  for (const verbs::Gid& gid : port.gids) gids.append(to_dict(gid));
  const bool opens = !port.state.empty();
  nb::dict entry;
  entry["name"] = port.name();
  entry["device"] = port.device;
  entry["port"] = unsigned{port.number};
  entry["link_layer"] = port.link_layer;
  entry["state"] = port.state;
  entry["lid"] = port.lid;
  entry["mtu"] = opens ? 128U << port.active_mtu : 0;
  entry["gigabits_per_second"] = port.gigabits_per_second;
  entry["numa_node"] = port.numa_node;
  entry["pci_path"] = port.pci_path;
  entry["firmware"] = std::string(port.limits.fw_ver, ::strnlen(port.limits.fw_ver, sizeof port.limits.fw_ver));
  entry["atomics"] = opens && port.limits.atomic_cap != IBV_ATOMIC_NONE;
  entry["gids"] = gids;
  entry["usable"] = port.unusable.empty();
  entry["chosen"] = verdict.gid.has_value();
  entry["gid"] = verdict.gid ? nb::object(to_dict(*verdict.gid)) : nb::none();
  entry["why"] = verdict.why;
  return entry;
}

nb::list survey_ports(const std::vector<std::string>& nics) {
  std::vector<verbs::Port> ports;
  std::vector<verbs::Verdict> verdicts;
  {
    Blocking blocking;
    ports = verbs::survey();
    verdicts = verbs::judge(ports, {.nics = nics, .numa_node = -1, .pci_path = {}});
  }
  nb::list entries;
  for (std::size_t i = 0; i < ports.size(); ++i) entries.append(to_dict(ports[i], verdicts[i]));
  return entries;
}

void use_verbs_table(std::uint64_t address) {
  verbs::use_api(reinterpret_cast<const verbs::Api*>(static_cast<std::uintptr_t>(address)));
}
#else
nb::list survey_ports(const std::vector<std::string>&) {
  fail(ErrorKind::Unsupported, verbs::unavailable());
}

void use_verbs_table(std::uint64_t) {
  fail(ErrorKind::Unsupported, verbs::unavailable());
}
#endif

}  // namespace

void register_doctor(nb::module_& m) {
  m.def("verbs_unavailable", &verbs::unavailable, "Why there is no libibverbs to call; empty if there is.");
  m.def("survey_ports", &survey_ports, nb::arg("nics") = std::vector<std::string>(),
        nb::sig("def survey_ports(nics: list[str] = []) -> list[dict[str, object]]"),
        "Every port of every RDMA device; `chosen` and `why` say what a transport makes of it. Unsupported "
        "without libibverbs, and for a wrong entry in `nics`.");
  m.def(
      "use_verbs_table", [](nb::handle address) { use_verbs_table(to_u64(address, "the table's address")); },
      nb::sig("def use_verbs_table(address: int) -> None"),
      "For tests: another table of functions in place of libibverbs; 0 for libibverbs again.");
}

}  // namespace onesided::python
