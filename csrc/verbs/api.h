// libibverbs as a table of functions, found at run time: an installation without rdma-core still imports, and a test puts
// an in-process provider in its place by one swap.
//
// Posting and polling are not in the table: libibverbs itself dispatches them through `context->ops`, inline in its header.
#pragma once

#if __has_include(<infiniband/verbs.h>)
#define ONESIDED_HAS_VERBS 1
#else
#define ONESIDED_HAS_VERBS 0
#endif

#include <string>

#if ONESIDED_HAS_VERBS
#include <infiniband/verbs.h>

namespace onesided::verbs {

// What is known of a network interface that a GID belongs to.
struct NetworkInterface {
  std::string name;        // empty if there is none
  bool is_bridge = false;  // docker0, virbr0 and the like: they lead into this host
};

struct Api {
  ibv_device** (*get_device_list)(int* count);
  void (*free_device_list)(ibv_device** list);
  const char* (*get_device_name)(ibv_device* device);
  ibv_context* (*open_device)(ibv_device* device);
  int (*close_device)(ibv_context* context);
  int (*query_device)(ibv_context* context, ibv_device_attr* attr);
  // Fills what came with the first version of the structure; give it zeroed.
  int (*query_port)(ibv_context* context, std::uint8_t port, ibv_port_attr* attr);
  ssize_t (*query_gid_table)(ibv_context* context, ibv_gid_entry* entries, std::size_t most, std::uint32_t flags,
                             std::size_t entry_size);
  NetworkInterface (*network_interface)(unsigned index);

  ibv_pd* (*alloc_pd)(ibv_context* context);
  int (*dealloc_pd)(ibv_pd* pd);
  // ibv_reg_mr_iova2: leaves out those optional flags (relaxed ordering) that the kernel does not know.
  ibv_mr* (*reg_mr)(ibv_pd* pd, void* address, std::size_t nbytes, std::uint64_t iova, unsigned access);
  ibv_mr* (*reg_dmabuf_mr)(ibv_pd* pd, std::uint64_t offset, std::size_t nbytes, std::uint64_t iova, int fd,
                           int access);
  int (*dereg_mr)(ibv_mr* mr);

  ibv_comp_channel* (*create_comp_channel)(ibv_context* context);
  int (*destroy_comp_channel)(ibv_comp_channel* channel);
  ibv_cq* (*create_cq)(ibv_context* context, int entries, void* cookie, ibv_comp_channel* channel, int vector);
  int (*destroy_cq)(ibv_cq* cq);
  int (*get_cq_event)(ibv_comp_channel* channel, ibv_cq** cq, void** cookie);
  void (*ack_cq_events)(ibv_cq* cq, unsigned count);

  ibv_qp* (*create_qp)(ibv_pd* pd, ibv_qp_init_attr* attr);
  int (*modify_qp)(ibv_qp* qp, ibv_qp_attr* attr, int mask);
  int (*query_qp)(ibv_qp* qp, ibv_qp_attr* attr, int mask, ibv_qp_init_attr* init);
  int (*destroy_qp)(ibv_qp* qp);

  int (*get_async_event)(ibv_context* context, ibv_async_event* event);
  void (*ack_async_event)(ibv_async_event* event);
  const char* (*wc_status_str)(ibv_wc_status status);
  int (*fork_init)();
};

// The table in use: libibverbs', unless a test has put another in its place. Throws Unsupported with unavailable()'s reason.
const Api& api();

// For tests: `other` is used from here on by everything that is made; null for libibverbs again. Not while anything made
// under another table lives.
void use_api(const Api* other);

}  // namespace onesided::verbs
#endif

namespace onesided::verbs {

// Why there is no libibverbs to call; empty if there is. Loads it the first time.
std::string unavailable();

}  // namespace onesided::verbs
