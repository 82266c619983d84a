#include "verbs/api.h"

#include <atomic>

#include "core/error.h"

#if ONESIDED_HAS_VERBS
#include <dlfcn.h>
#include <net/if.h>
#include <sys/stat.h>

namespace onesided::verbs {
namespace {

NetworkInterface network_interface(unsigned index) {
  char name[IF_NAMESIZE] = {};
  if (index == 0 || ::if_indextoname(index, name) == nullptr) return {};
  struct stat found{};
  const std::string bridge = text("/sys/class/net/", name, "/bridge");
  return {name, ::stat(bridge.c_str(), &found) == 0};
}

struct Loaded {
  Api api{};
  std::string reason;

  Loaded() {
    void* const library = ::dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      reason = text("libibverbs is not installed (", ::dlerror(), "); on Debian or Ubuntu: apt-get install ",
                    "libibverbs1 ibverbs-providers");
      return;
    }
    // By version: the default of a name may one day take other structures than those of the header used here.
    const auto find = [&](auto& function, const char* name, const char* version) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlvsym(library, name, version));
      if (function == nullptr && reason.empty()) {
        reason = text("libibverbs has no ", name, "@", version, ": it is older than rdma-core 29");
      }
    };
    find(api.get_device_list, "ibv_get_device_list", "IBVERBS_1.1");
    find(api.free_device_list, "ibv_free_device_list", "IBVERBS_1.1");
    find(api.get_device_name, "ibv_get_device_name", "IBVERBS_1.1");
    find(api.open_device, "ibv_open_device", "IBVERBS_1.1");
    find(api.close_device, "ibv_close_device", "IBVERBS_1.1");
    find(api.query_device, "ibv_query_device", "IBVERBS_1.1");
    find(api.query_port, "ibv_query_port", "IBVERBS_1.1");
    find(api.query_gid_table, "_ibv_query_gid_table", "IBVERBS_1.11");
    find(api.alloc_pd, "ibv_alloc_pd", "IBVERBS_1.1");
    find(api.dealloc_pd, "ibv_dealloc_pd", "IBVERBS_1.1");
    find(api.reg_mr, "ibv_reg_mr_iova2", "IBVERBS_1.8");
    find(api.dereg_mr, "ibv_dereg_mr", "IBVERBS_1.1");
    find(api.create_comp_channel, "ibv_create_comp_channel", "IBVERBS_1.0");
    find(api.destroy_comp_channel, "ibv_destroy_comp_channel", "IBVERBS_1.0");
    find(api.create_cq, "ibv_create_cq", "IBVERBS_1.1");
    find(api.destroy_cq, "ibv_destroy_cq", "IBVERBS_1.1");
    find(api.get_cq_event, "ibv_get_cq_event", "IBVERBS_1.1");
    find(api.ack_cq_events, "ibv_ack_cq_events", "IBVERBS_1.1");
    find(api.create_qp, "ibv_create_qp", "IBVERBS_1.1");
    find(api.modify_qp, "ibv_modify_qp", "IBVERBS_1.1");
    find(api.query_qp, "ibv_query_qp", "IBVERBS_1.1");
    find(api.destroy_qp, "ibv_destroy_qp", "IBVERBS_1.1");
    find(api.get_async_event, "ibv_get_async_event", "IBVERBS_1.1");
    find(api.ack_async_event, "ibv_ack_async_event", "IBVERBS_1.1");
    find(api.wc_status_str, "ibv_wc_status_str", "IBVERBS_1.1");
    find(api.fork_init, "ibv_fork_init", "IBVERBS_1.1");
    // Newer than what is asked for at least; memory of GPUs needs it.
    api.reg_dmabuf_mr =
        reinterpret_cast<decltype(api.reg_dmabuf_mr)>(::dlvsym(library, "ibv_reg_dmabuf_mr", "IBVERBS_1.12"));
    api.network_interface = network_interface;
    // Kernels since 5.12 copy registered pages in a fork. On older ones only this keeps the parent's, at the price that a child
    // has no such page at all, with whatever else lies on it: so it is not asked for without need.
    constexpr int kUnneeded = 2;  // IBV_FORK_UNNEEDED, which older headers do not have
    const auto fork_state = reinterpret_cast<int (*)()>(::dlvsym(library, "ibv_is_fork_initialized", "IBVERBS_1.13"));
    if (reason.empty() && (fork_state == nullptr || fork_state() != kUnneeded)) api.fork_init();
  }
};

std::atomic<const Api*> other_api{nullptr};

const Loaded& loaded() {
  static const auto* const library = new Loaded;
  return *library;
}

}  // namespace

const Api& api() {
  if (const Api* other = other_api.load(std::memory_order_acquire); other != nullptr) return *other;
  if (!loaded().reason.empty()) fail(ErrorKind::Unsupported, loaded().reason);
  return loaded().api;
}

void use_api(const Api* other) {
  other_api.store(other, std::memory_order_release);
}

std::string unavailable() {
  return other_api.load(std::memory_order_acquire) != nullptr ? std::string() : loaded().reason;
}

}  // namespace onesided::verbs
#else

namespace onesided::verbs {

std::string unavailable() {
  return "this package was built without libibverbs' headers (on Debian or Ubuntu: apt-get install libibverbs-dev, "
         "then "
         "install onesided again)";
}

}  // namespace onesided::verbs
#endif
