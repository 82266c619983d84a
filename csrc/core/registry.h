// What the hub of every transport knows by number: the memories that peers may open, and the endpoints that it handed out.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/handle.h"
#include "core/process.h"
#include "core/stats.h"

namespace onesided {

// The base of a hub. Its lock guards what the hub adds to it, too.
template <class Memory>
class Registry {
 public:
  const Token& token() const { return token_; }  // of this transport, in its handles and endpoints
  const std::shared_ptr<Counters>& counters() const { return counters_; }

  std::uint32_t made_in() const { return made_in_; }
  // True in a child of the process that made it. The lock may be held for ever there, and the lists may be half changed.
  bool forked() const { return made_in_ != fork_generation(); }
  bool stopped() const { return stopped_.load(); }
  void check_usable(const char* what) const {
    check_not_forked(made_in_, what);
    if (stopped()) fail(ErrorKind::StaleHandle, what, " is closed");
  }
  // Refuses new memories, connections and endpoints from here on, so that all can be closed.
  void retire() {
    std::lock_guard lock(mutex_);
    retired_ = true;
  }

  // The number of a memory to be. None is ever used twice.
  std::uint64_t next_memory_id() {
    std::lock_guard lock(mutex_);
    check_not_retired();
    return next_id_++;
  }
  // A listed memory stays in the list until it withdraws itself, which it does before anything else when it is destroyed:
  // with the lock held, the pointers of the list are good.
  void list(Memory* memory) {
    std::lock_guard lock(mutex_);
    check_not_retired();
    memories_[memory->id()] = memory;
  }
  void withdraw(std::uint64_t memory_id) {
    std::lock_guard lock(mutex_);
    memories_.erase(memory_id);
  }
  std::vector<std::shared_ptr<Memory>> memories() {
    std::vector<std::shared_ptr<Memory>> alive;  // outlives the lock: the last to let go of one takes it again
    std::lock_guard lock(mutex_);
    for (const auto& [id, memory] : memories_) {
      if (auto shared = memory->weak_from_this().lock()) alive.push_back(std::move(shared));
    }
    return alive;
  }
  // Wakes everybody who waits for a signal, to look at who is lost.
  void wake_waiters() {
    std::lock_guard lock(mutex_);
    for (const auto& [id, memory] : memories_) memory->control().event().notify();
  }

  std::mutex& mutex() { return mutex_; }

 protected:
  explicit Registry(TransportKind kind) : kind_(kind), counters_(counters_for(name_of(kind), "")) {}
  ~Registry() = default;

  // An endpoint for `peer`, or for anybody, who introduces itself at `address`. A shared one is always the same. `host`: whom
  // they must be on one host with; zero if that does not matter.
  Endpoint bind(bool shared, const std::string& peer, const std::string& address, const Token& host = {}) {
    std::lock_guard lock(mutex_);
    check_not_retired();
    if (const auto known = shared_endpoints_.find(peer); shared && known != shared_endpoints_.end())
      return known->second;
    const Endpoint endpoint{
        kind_, shared, token_, host, next_id_++, random_token(), static_cast<std::uint32_t>(::getpid()), address};
    bound_[endpoint.endpoint_id] = {endpoint.secret, shared, peer};
    if (shared) shared_endpoints_[peer] = endpoint;
    return endpoint;
  }

  // All below with the lock held.
  void check_not_retired() const {
    if (retired_) fail(ErrorKind::StaleHandle, "this transport is closed");
  }
  // Whether a peer knows the secret of an endpoint; one that is not shared is good once. Returns whom it was bound for.
  std::string greeted(std::uint64_t endpoint_id, const Token& secret) {
    const auto bound = bound_.find(endpoint_id);
    if (bound == bound_.end()) {
      fail(ErrorKind::StaleHandle, "connect: this endpoint was used already, or its transport was made anew");
    }
    if (!same_secret(bound->second.secret, secret)) fail(ErrorKind::Handle, "connect: this endpoint's secret is wrong");
    std::string peer = bound->second.peer;
    if (!bound->second.shared) bound_.erase(bound);
    return peer;
  }
  // The memory that a peer has a handle of, and what this peer may do with it.
  std::pair<Memory&, Access> opened(std::uint64_t memory_id, const Token& key, const std::string& peer) const {
    const auto found = memories_.find(memory_id);
    if (found == memories_.end() || found->second->closed()) {
      fail(ErrorKind::StaleHandle, "attach: this memory was closed");
    }
    if (!same_secret(found->second->key(), key)) {
      fail(ErrorKind::Handle, "attach: this handle's key does not fit the memory");
    }
    const Access access = found->second->permissions().of(peer);
    if (access == Access::None) {
      fail(ErrorKind::RemoteAccess, "attach: this memory is not, or not any more, for ",
           peer.empty() ? "just anybody" : peer);
    }
    return {*found->second, access};
  }
  const std::unordered_map<std::uint64_t, Memory*>& listed() const { return memories_; }

  std::mutex mutex_;
  std::atomic<bool> stopped_{false};

 private:
  struct Bound {
    Token secret;
    bool shared;
    std::string peer;
  };

  const TransportKind kind_;
  const Token token_ = random_token();
  const std::uint32_t made_in_ = fork_generation();
  const std::shared_ptr<Counters> counters_;
  bool retired_ = false;
  std::uint64_t next_id_ = 1;
  std::unordered_map<std::uint64_t, Memory*> memories_;
  std::unordered_map<std::uint64_t, Bound> bound_;
  std::unordered_map<std::string, Endpoint> shared_endpoints_;  // by peer
};

}  // namespace onesided
