// Which ports of which RDMA devices there are, which of them are used, and why.
#pragma once

#include "verbs/api.h"

#if ONESIDED_HAS_VERBS
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/transport.h"

namespace onesided::verbs {

// One entry of a port's GID table.
struct Gid {
  ibv_gid value{};
  std::uint32_t index = 0;
  std::uint32_t type = 0;  // IBV_GID_TYPE_IB, _ROCE_V1, _ROCE_V2
  NetworkInterface interface;

  std::string address() const;    // "10.77.0.1" for an IPv4-mapped one, else IPv6 notation
  std::string type_name() const;  // "IB", "RoCE v1", "RoCE v2"
  bool is_ipv4() const;           // mapped into IPv6, as RoCE carries it
};

// One port of one device, whether it can be used or not. What doctor prints and choose_rails() chooses from.
struct Port {
  std::string device;
  std::uint8_t number = 1;
  std::string link_layer;  // "Ethernet", "InfiniBand"
  std::string state;       // "ACTIVE", "DOWN", ...
  std::uint16_t lid = 0;
  ibv_mtu active_mtu = IBV_MTU_1024;
  double gigabits_per_second = 0;  // 0 if the device does not tell
  int numa_node = -1;              // -1 if it has none, a software device for instance
  std::string pci_path;            // its place in the PCI tree as sysfs spells it; empty for a software device
  std::vector<Gid> gids;           // the valid entries, in table order
  ibv_device_attr limits{};
  std::string unusable;    // why it cannot be used; empty if it can
  std::optional<Gid> gid;  // the entry that is used if nothing is pinned; set if usable
  bool pinnable = false;   // unusable for its addresses only: a program that pins the port gets it

  std::string name() const;  // "mlx5_0:1"; a device that does not open has no ":port"
};

// Which entry of a port's GID table to use, and what it is ("RoCE v2, global address"); none, and why not.
struct GidChoice {
  std::optional<Gid> gid;
  std::string why;
};
// RoCE v2 before v1, which no router passes on; then global addresses before link-local ones; then IPv4, which the routers of
// most clusters carry; then the lowest index. InfiniBand: the first entry. Addresses that lead only into this host (loopback,
// bridges of containers) are taken if `pinned`.
GidChoice choose_gid(const std::string& link_layer, const std::vector<Gid>& gids, bool pinned = false);

// Every port of every device. A device that does not open is a port 0 whose `unusable` says why. Throws only if there is no
// libibverbs (see unavailable()).
std::vector<Port> survey();

struct RailChoice {
  // What the program pinned: "mlx5_0", "mlx5_0:1", and a GID behind a slash, by index or by address: "mlx5_0:1/3",
  // "mlx5_0:1/10.0.0.7". Empty: all that are as good as the best, kMostRails at most.
  std::vector<std::string> nics;
  // Where the memory is that will be sent: a NUMA node, or the PCI path of a GPU. Nearer ports are preferred.
  int numa_node = -1;
  std::string pci_path;
};
inline constexpr std::size_t kMostRails = 8;

struct Rail {
  Port port;
  Gid gid;
  std::string why;  // for describe(): "RoCE v2, global address, nearest of 4 ports"
};

// What becomes of one port, and why.
struct Verdict {
  std::optional<Gid> gid;  // set if it is chosen
  std::string why;
};
// One for each of `ports`, in their order. Throws Unsupported for a wrong entry in `nics` only.
//
// Of the usable ports these are left out, one step after the other, as long as any remains: software devices; ports without
// a routable address; ports of another NUMA node, then farther ones in the PCI tree (a port whose place is unknown stays);
// those slower than 90 % of the fastest; Ethernet where there is InfiniBand, as the two do not reach each other.
std::vector<Verdict> judge(const std::vector<Port>& ports, const RailChoice& choice);

// The ports that judge() chooses. Throws Unsupported, naming every port that was looked at and why it was not taken, if
// there is none; for a wrong entry in `nics`, that entry. Rails come sorted by name, so that both ends pair them alike.
std::vector<Rail> choose_rails(const std::vector<Port>& ports, const RailChoice& choice);

// An open device with its protection domain. Shared by everything made on it; closed with the last user.
class Device {
 public:
  // Throws Unsupported if it is gone, or ErrorKind::Onesided with what the system said.
  static std::shared_ptr<Device> open(const std::string& name);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const std::string& name() const { return name_; }
  ibv_context* context() const { return context_; }
  ibv_pd* pd() const { return pd_; }
  const ibv_device_attr& limits() const { return limits_; }

 private:
  explicit Device(std::string name) : name_(std::move(name)) {}

  const std::string name_;
  ibv_context* context_ = nullptr;
  ibv_pd* pd_ = nullptr;
  ibv_device_attr limits_{};
};

// One row a port, for `onesided doctor` and for transport.describe().
Description describe(const Port& port);
Description describe(const Rail& rail);

}  // namespace onesided::verbs
#endif
