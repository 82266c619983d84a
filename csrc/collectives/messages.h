// Messages between two ranks: sends and receives that meet by rank and tag.
//
// All messages from one rank to another are one stream of chunks, in the order in which they were sent. The receiver looks at the first
// chunk of a message and finds the receive it is for. While there is none the message stays where it is, and its sender waits when
// the slots are full; only if a receive waits for something behind it, it is set aside in memory of this process.
//
// There is no thread here: of all threads that wait for a message, one has the turn and moves everybody's. A message that nobody waits
// for is moved by the thread in serve().
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "collectives/inboxes.h"

namespace onesided {

// A send or a receive.
class Message {
 public:
  bool over() const { return over_.load(std::memory_order_acquire); }
  // Of one that is over: its error, if it failed; the rank of the other end, if it succeeded.
  const std::optional<Error>& error() const { return error_; }
  std::optional<unsigned> rank() const { return rank_; }

 private:
  friend class Messages;
  bool sends_;
  std::optional<unsigned> rank_;  // of a receive from anybody: once it has met its message
  std::uint64_t tag_;
  char* data_;  // only read, if it sends
  std::uint64_t nbytes_;
  How how_;  // its deadline, and what data_ is a part of
  std::uint64_t done_ = 0;
  std::vector<std::shared_ptr<Work>> works_;
  std::optional<Error> error_;
  std::atomic<bool> over_{false};
};

class Messages {
 public:
  // Over inboxes that nobody else uses.
  explicit Messages(std::shared_ptr<Inboxes> inboxes);

  // Starts one. `how.deadline` is its own: a message of which nothing has moved by then is taken back, and fails alone. A receive whose
  // message is under way fails, and the rest of that is thrown away. A send that is under way is the end of all messages on all
  // ranks, since its other half cannot be taken back.
  //
  // `served`: somebody is in serve(). BoundsError for a rank that is none, or this one.
  std::shared_ptr<Message> send(unsigned rank, std::uint64_t tag, const void* from, std::uint64_t nbytes, How how,
                                bool served);
  // From `rank`, or from anybody. The message must have the same size: else BoundsError, and it is lost.
  std::shared_ptr<Message> receive(std::optional<unsigned> rank, std::uint64_t tag, void* into, std::uint64_t nbytes,
                                   How how, bool served);

  // Returns when it is over, false at the deadline; that ends the wait only.
  bool wait(const std::shared_ptr<Message>& message, const Deadline& deadline);
  // As its deadline does, now.
  void withdraw(const std::shared_ptr<Message>& message, const std::string& why);

  // Moves what others do not, until close().
  void serve();

  void end(ErrorKind kind, const std::string& reason) { inboxes_->end(kind, reason); }
  // Messages that are not over fail with StaleHandle, as do later ones. serve() returns. Waits for who has the turn.
  void close();

 private:
  // A message that comes from a rank.
  struct Incoming {
    std::uint64_t tag;
    std::uint64_t nbytes;
    std::uint64_t done = 0;
    std::shared_ptr<Message> message{};  // what it is for; without it and `aside` it is thrown away
    bool aside = false;
    std::vector<char> bytes{};
  };
  struct Peer {
    std::deque<std::shared_ptr<Message>> sends;
    std::shared_ptr<Incoming> incoming;               // of which there are chunks to come
    std::deque<std::shared_ptr<Incoming>> set_aside;  // complete, or `incoming`
  };

  std::shared_ptr<Message> start(std::shared_ptr<Message> message, bool served);
  void drive(const Message* until, const Deadline& deadline);
  bool move_some();
  bool send_some(unsigned rank);
  bool receive_some(unsigned rank);
  bool meet_set_aside(const std::shared_ptr<Message>& message);
  bool meet(const std::shared_ptr<Message>& message, unsigned rank, Incoming& incoming);
  std::shared_ptr<Message> posted_for(unsigned rank, std::uint64_t tag);
  bool awaited(unsigned rank) const;
  void give_up_late_and_lost(bool went_on);
  void give_up(const std::shared_ptr<Message>& message, Error error);
  void fail_all(const Error& error);
  void finish(const std::shared_ptr<Message>& message, std::optional<Error> error);
  void wait_for_any(const Deadline& deadline);
  bool someone_drives() const { return driven_.load(std::memory_order_seq_cst); }

  const std::shared_ptr<Inboxes> inboxes_;
  std::mutex mutex_;  // of all that follows
  std::vector<Peer> peers_;
  std::deque<std::shared_ptr<Message>> posted_;  // receives that have not met a message, oldest first
  std::size_t under_way_ = 0;                    // messages not over
  bool closed_ = false;
  std::atomic<bool> driven_{false};
  std::atomic<bool> needed_{false};  // there are messages, or serve() is to end
  Event changed_;                    // a message is over that others may wait for, or the turn is free
  Event serve_;                      // for serve(): it is needed
};

}  // namespace onesided
