// What one shm transport shares with its memories and connections: a listening socket, the list of what peers may open,
// and the thread that answers them and notices their death. The thread sleeps unless a peer connects, opens a memory or
// dies; no transfer passes through it.
#pragma once

#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "core/registry.h"
#include "core/segment.h"
#include "shm/memory.h"
#include "shm/socket.h"

namespace onesided::shm {

class ShmConnection;

// A random token of this host, boot and network namespace: peers with the same one can reach each other's sockets.
Token host_token();

class Hub : public Registry<ShmMemory>, public std::enable_shared_from_this<Hub> {
 public:
  Hub();
  ~Hub();

  void start();
  // Ends the thread and the listening. Memories and connections must be closed before.
  void stop();

  Endpoint bind(bool shared, const std::string& peer = {}) {
    return Registry::bind(shared, peer, address_, host_token());
  }

  // Watches a connection's socket and, if there is one, its peer's pidfd until unwatch().
  void watch(const std::shared_ptr<ShmConnection>& connection, int socket, int pidfd);
  void unwatch(int socket, int pidfd);
  std::vector<std::shared_ptr<ShmConnection>> connections();
  // Both with the lock held.
  std::string name_of_holder(int socket) const;
  bool is_held_by(int socket, const std::string& peer) const;

 private:
  struct Incoming {
    Fd socket;
    pid_t pid = 0;
    bool greeted = false;
    std::string peer;  // whom its endpoint was bound for
    // What the last Attach got, in case it is given up.
    std::uint64_t request_id = 0;
    std::uint64_t memory_id = 0;
    std::uint32_t slot = 0;
  };
  void run();
  void accept_all();
  void admit(Fd socket);
  void serve(int socket);
  Reply answer(Incoming& peer, const Request& request, std::vector<int>& fds, Fd& keep_open);
  void free_slot(std::uint64_t memory_id, std::uint32_t slot, int socket);
  void open_memory(Incoming& peer, const Request& request, Reply& reply, std::vector<int>& fds, Fd& keep_open);
  void drop(int socket);
  void check_watched(int fd);

  const std::string address_;
  Fd listener_;
  Fd epoll_;
  Fd wake_;
  std::thread thread_;

  std::unordered_map<int, Incoming> incoming_;
  std::unordered_map<int, std::weak_ptr<ShmConnection>> watched_;
};

}  // namespace onesided::shm
