// What the tests of the data plane share.
#pragma once

#include <dirent.h>
#include <doctest/doctest.h>
#include <signal.h>
#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <exception>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/event.h"
#include "core/transport.h"
#include "shm/transport.h"

namespace onesided::tests {

#if defined(__SANITIZE_THREAD__)
inline constexpr bool kUnderTsan = true;
#else
inline constexpr bool kUnderTsan = false;
#endif

// Rounds of a stress test: fewer where each step is ten times slower.
inline constexpr unsigned rounds(unsigned plain) {
  return kUnderTsan ? (plain + 3) / 4 : plain;
}

// The longest that anything may take that must happen at all; generous, since both cores may be busy elsewhere.
inline constexpr double kPatience = 20;
inline Deadline patience() {
  return Deadline::after(kPatience);
}

// The name of the error that `call` throws, "" if it throws none.
const char* name_of(ErrorKind kind);
template <class Call>
std::string raised(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return name_of(error.kind());
  }
  return "";
}
// What the error says, "" if there is none.
template <class Call>
std::string said(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}
inline bool contains(const std::string& whole, const std::string& part) {
  return whole.find(part) != std::string::npos;
}

// Waits until `condition` holds; false if it does not in time.
template <class Condition>
bool happens(Condition&& condition, double seconds = kPatience) {
  for (const Deadline deadline = Deadline::after(seconds); !condition();) {
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return true;
}
// The same; what did not happen is in the exception.
template <class Condition>
void eventually(const std::string& what, Condition&& condition, double seconds = kPatience) {
  if (!happens(condition, seconds)) throw std::runtime_error("did not happen in time: " + what);
}

// Runs all at once, joins them, and throws what the first one that failed threw.
void side_by_side(const std::vector<std::function<void()>>& bodies);
template <class Body>
void side_by_side(unsigned threads, Body&& body) {
  std::vector<std::function<void()>> bodies;
  for (unsigned i = 0; i < threads; ++i) bodies.push_back([&body, i] { body(i); });
  side_by_side(bodies);
}

class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count(); }

 private:
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

// Bytes that repeat nowhere near.
std::vector<char> random_bytes(std::size_t nbytes, std::uint64_t seed);
inline bool all_are(const void* bytes, std::size_t nbytes, char value) {
  const auto* at = static_cast<const char*>(bytes);
  return nbytes == 0 || (at[0] == value && std::memcmp(at, at + 1, nbytes - 1) == 0);
}

std::size_t open_fds();
// Mappings of this process whose name contains `name`.
std::size_t mappings(const std::string& name = "onesided");

std::string to_hex(const std::string& bytes);
std::string from_hex(const std::string& digits);

// This program run once more in a process of its own, with a role. It is told and tells one line at a time, and is killed
// with this object.
class Process {
 public:
  // `inherit` is a descriptor that the process gets as number 3.
  explicit Process(const std::string& role, int inherit = -1);
  ~Process();
  Process(const Process&) = delete;

  pid_t pid() const { return pid_; }
  void tell(const std::string& line);
  std::string hear(double seconds = kPatience);
  // Tells and hears; the answer must begin with "ok", and the rest of it is returned.
  std::string ask(const std::string& line);
  // Tells and hears: the name of the error that is answered, "" for ok.
  std::string refused(const std::string& line);
  void signal(int number);
  // Stops it, and returns when it has stopped.
  void stop();
  void go_on() { signal(SIGCONT); }
  void kill();
  // Its wait status once it has ended.
  int ended(double seconds = kPatience);

 private:
  pid_t pid_ = -1;
  int socket_ = -1;
  std::string unread_;
  bool reaped_ = false;
};

// The roles; each returns the exit status. Only main() knows them all.
int peer_role();
int event_role();

// Two transports of this process that are connected both ways.
struct Pair {
  std::shared_ptr<shm::ShmTransport> a = std::make_shared<shm::ShmTransport>();
  std::shared_ptr<shm::ShmTransport> b = std::make_shared<shm::ShmTransport>();
  std::shared_ptr<Connection> to_b = a->connect(b->bind(false), "b", patience());
  std::shared_ptr<Connection> to_a = b->connect(a->bind(false), "a", patience());

  ~Pair() {
    a->close(patience());
    b->close(patience());
  }
};

}  // namespace onesided::tests
