// What one rdma transport shares with its memories and connections: its devices, a TCP listener through which peers introduce
// themselves, the list of what they may open, and the thread that answers them, notices their death, and hears what the
// devices report. The thread sleeps otherwise; no transfer passes through it.
#pragma once

#include "verbs/memory.h"

#if ONESIDED_HAS_VERBS
#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "core/registry.h"
#include "net/framed.h"

namespace onesided::verbs {

class RdmaConnection;

class Hub : public Registry<RdmaMemory>, public std::enable_shared_from_this<Hub> {
 public:
  // Whom the endpoints are bound for by which a transport connects to itself.
  static constexpr const char* kOwner = "the owner itself";

  // `host`: the address to listen on; empty for that of the first rail, or of this host if the rail has none.
  Hub(std::vector<Rail> rails, const Tuning& tuning, std::string host);
  ~Hub();

  void start();
  void stop();

  Endpoint bind(bool shared, const std::string& peer = {}) { return Registry::bind(shared, peer, listener_.address); }

  const std::vector<Rail>& rails() const { return rails_; }
  const std::vector<std::shared_ptr<Device>>& devices() const { return devices_; }  // by rail
  const Tuning& tuning() const { return tuning_; }
  const std::string& address() const { return listener_.address; }

  // The registration of an object of the caller's, kept for as long as the object lives and this transport is open.
  std::shared_ptr<Registration> registration_of(const std::shared_ptr<Allocation>& allocation);
  // Has every peer that opened the memory end its operations on it; takes the queue pairs of those that do not in time. With
  // `peer`, only this one is to have done with it: the others open it again, with new keys.
  void revoke(std::uint64_t memory_id, const std::string* peer, const Deadline& deadline);

  void watch(const std::shared_ptr<RdmaConnection>& connection);
  void unwatch(int socket);
  std::vector<std::shared_ptr<RdmaConnection>> connections();
  // Has the thread look at connections that have something to finish.
  void nudge();

 private:
  static constexpr double kGreeting = 10;  // seconds for a stranger to introduce itself
  static constexpr std::size_t kMostStrangers = 1024;
  static constexpr unsigned kFramesATurn = 64;

  // How often a peer has opened a memory, and how many of these it was told to end.
  struct Held {
    unsigned count = 0, told = 0;
  };
  struct Incoming {
    std::unique_ptr<net::FramedSocket> socket;
    bool greeted = false;
    std::string peer;  // whom its endpoint was bound for
    std::vector<std::unique_ptr<Responder>> responders;
    std::map<std::uint64_t, Held> attached;  // by memory
    Deadline greets = Deadline::after(kGreeting);
  };

  void run();
  void accept_all();
  void serve(int fd);
  std::optional<Message> answer(Incoming& peer, const Message& message);
  void open_pairs(Incoming& peer, const Message& message, Message& reply);
  void drop(int fd);
  bool drop_silent_strangers();
  void hear(const std::shared_ptr<RdmaConnection>& connection, std::uint32_t events);
  void report(Device& device);
  void update_events(int fd, bool rest);

  const std::vector<Rail> rails_;
  const Tuning tuning_;
  std::vector<std::shared_ptr<Device>> devices_;
  net::Listener listener_;
  Fd epoll_;
  Fd wake_;
  std::thread thread_;

  Event revoked_;
  std::atomic<std::uint64_t> answers_{0};  // grows with every Revoked and every end of a peer
  std::vector<std::weak_ptr<Allocation>> allocations_;
  std::unordered_map<int, Incoming> incoming_;
  std::unordered_map<int, std::weak_ptr<RdmaConnection>> watched_;
};

}  // namespace onesided::verbs
#endif
