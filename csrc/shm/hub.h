// What one shm transport shares with its memories and connections: a listening socket, the list of what peers may open,
// and the thread that answers them and notices their death. The thread sleeps unless a peer connects, opens a memory or
// dies; no transfer passes through it.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "core/process.h"
#include "core/segment.h"
#include "shm/memory.h"
#include "shm/socket.h"

namespace onesided::shm {

class ShmConnection;

// A random token of this host, boot and network namespace: peers with the same one can reach each other's sockets.
Token host_token();

class Hub : public std::enable_shared_from_this<Hub> {
 public:
  Hub();
  ~Hub();

  void start();
  // Refuses new memories and connections from here on, so that all can be closed before stop().
  void retire();
  // Ends the thread and the listening. Memories and connections must be closed before.
  void stop();

  const Token& token() const { return token_; }
  const std::shared_ptr<Counters>& counters() const { return counters_; }
  void check_usable(const char* what) const;
  bool stopped() const { return stopped_.load(); }
  std::uint32_t made_in() const { return made_in_; }
  // True in a child of the process that made it. Its mutex may be held for ever, and its lists may be half changed.
  bool forked() const { return made_in_ != fork_generation(); }

  // A shared endpoint is always the same one.
  Endpoint bind(bool shared);

  std::uint64_t next_memory_id();
  // A listed memory stays in the list until it withdraws itself, which it does before anything else when it is destroyed:
  // with the lock held, the pointers of the list are good.
  void list(ShmMemory* memory);
  void withdraw(std::uint64_t memory_id);
  std::vector<std::shared_ptr<ShmMemory>> memories();

  // Watches a connection's socket and, if there is one, its peer's pidfd until unwatch().
  void watch(const std::shared_ptr<ShmConnection>& connection, int socket, int pidfd);
  void unwatch(int socket, int pidfd);
  std::vector<std::shared_ptr<ShmConnection>> connections();
  // Wakes everybody who waits for a signal, to look at who is lost.
  void wake_waiters();

  std::mutex& mutex() { return mutex_; }
  std::string name_of_holder(int socket) const;  // with the lock held

 private:
  struct Incoming {
    Fd socket;
    pid_t pid = 0;
    bool greeted = false;
    // What the last Attach got, in case it is given up.
    std::uint64_t request_id = 0;
    std::uint64_t memory_id = 0;
    std::uint32_t slot = 0;
  };
  struct Bound {
    Token secret;
    bool shared;
  };

  void check_not_retired() const;
  void run();
  void accept_all();
  void admit(Fd socket);
  void serve(int socket);
  Reply answer(Incoming& peer, const Request& request, std::vector<int>& fds, Fd& keep_open);
  void free_slot(std::uint64_t memory_id, std::uint32_t slot, int socket);
  void greet(Incoming& peer, const Request& request);
  void open_memory(Incoming& peer, const Request& request, Reply& reply, std::vector<int>& fds, Fd& keep_open);
  void drop(int socket);
  void check_watched(int fd);

  const Token token_ = random_token();
  const std::uint32_t made_in_;
  const std::shared_ptr<Counters> counters_;
  const std::string address_;
  Fd listener_;
  Fd epoll_;
  Fd wake_;
  std::thread thread_;
  std::atomic<bool> stopped_{false};

  std::mutex mutex_;
  bool retired_ = false;
  std::uint64_t next_id_ = 1;
  std::unordered_map<std::uint64_t, ShmMemory*> memories_;
  std::unordered_map<std::uint64_t, Bound> bound_;
  std::optional<Endpoint> shared_endpoint_;
  std::unordered_map<int, Incoming> incoming_;
  std::unordered_map<int, std::weak_ptr<ShmConnection>> watched_;
};

}  // namespace onesided::shm
