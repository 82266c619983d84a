#include "tests/support.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

extern char** environ;

namespace onesided::tests {

const char* name_of(ErrorKind kind) {
  static constexpr const char* names[] = {"Onesided",    "ConnectionLost", "DeadlineExceeded", "RemoteAccess",
                                          "Bounds",      "Layout",         "Handle",           "Registration",
                                          "StaleHandle", "Unsupported"};
  static_assert(std::size(names) == kErrorKinds);
  return names[static_cast<unsigned>(kind)];
}

void side_by_side(const std::vector<std::function<void()>>& bodies) {
  std::mutex mutex;
  std::exception_ptr first;
  std::atomic<std::size_t> waiting{bodies.size()};
  std::vector<std::thread> threads;
  for (const auto& body : bodies) {
    threads.emplace_back([&] {
      --waiting;
      while (waiting != 0) std::this_thread::yield();
      try {
        body();
      } catch (...) {
        std::lock_guard lock(mutex);
        if (first == nullptr) first = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  if (first != nullptr) std::rethrow_exception(first);
}

std::vector<char> random_bytes(std::size_t nbytes, std::uint64_t seed) {
  std::vector<char> bytes(nbytes + 8);
  std::uint64_t state = seed * 0x9E3779B97F4A7C15u + 1;
  for (std::size_t at = 0; at < nbytes; at += 8) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    std::memcpy(bytes.data() + at, &state, 8);
  }
  bytes.resize(nbytes);
  return bytes;
}

std::size_t open_fds() {
  DIR* const directory = ::opendir("/proc/self/fd");
  std::size_t count = 0;
  while (::readdir(directory) != nullptr) ++count;
  ::closedir(directory);
  return count;
}

std::size_t mappings(const std::string& name) {
  std::ifstream maps("/proc/self/maps");
  std::size_t count = 0;
  for (std::string line; std::getline(maps, line);) count += contains(line, name);
  return count;
}

std::string to_hex(const std::string& bytes) {
  std::string digits;
  for (const char byte : bytes) {
    digits += "0123456789abcdef"[static_cast<unsigned char>(byte) >> 4];
    digits += "0123456789abcdef"[byte & 15];
  }
  return digits;
}

std::string from_hex(const std::string& digits) {
  std::string bytes;
  for (std::size_t i = 0; i + 1 < digits.size(); i += 2)
    bytes += static_cast<char>(std::stoi(digits.substr(i, 2), nullptr, 16));
  return bytes;
}

// ---- Process --------------------------------------------------------------------------------------------------------

Process::Process(const std::string& role, int inherit) {
  int pair[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) throw std::runtime_error("no socket pair");
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, pair[1], 0);
  ::posix_spawn_file_actions_adddup2(&actions, pair[1], 1);
  if (inherit >= 0) ::posix_spawn_file_actions_adddup2(&actions, inherit, 3);
  std::string program = "onesided-tests", first = "role", second = role;
  char* arguments[] = {program.data(), first.data(), second.data(), nullptr};
  const int error = ::posix_spawn(&pid_, "/proc/self/exe", &actions, nullptr, arguments, environ);
  ::posix_spawn_file_actions_destroy(&actions);
  ::close(pair[1]);
  socket_ = pair[0];
  if (error != 0) throw std::runtime_error("cannot start a process of this program");
}

Process::~Process() {
  if (!reaped_) kill();
  ::close(socket_);
}

void Process::tell(const std::string& line) {
  const std::string bytes = line + "\n";
  if (::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(bytes.size())) {
    throw std::runtime_error("the process does not listen to: " + line);
  }
}

std::string Process::hear(double seconds) {
  const Deadline deadline = Deadline::after(seconds);
  for (;;) {
    if (const auto end = unread_.find('\n'); end != std::string::npos) {
      std::string line = unread_.substr(0, end);
      unread_.erase(0, end + 1);
      return line;
    }
    if (!shm::wait_readable(socket_, deadline)) throw std::runtime_error("the process says nothing");
    char bytes[4096];
    const ssize_t got = ::read(socket_, bytes, sizeof bytes);
    if (got <= 0) throw std::runtime_error("the process has ended");
    unread_.append(bytes, static_cast<std::size_t>(got));
  }
}

std::string Process::ask(const std::string& line) {
  tell(line);
  const std::string answer = hear();
  if (answer.rfind("ok", 0) != 0) throw std::runtime_error(line + ": " + answer);
  return answer.size() > 3 ? answer.substr(3) : "";
}

std::string Process::refused(const std::string& line) {
  tell(line);
  const std::string answer = hear();
  return answer.rfind("ok", 0) == 0 ? "" : answer.substr(0, answer.find(' '));
}

void Process::signal(int number) {
  ::kill(pid_, number);
}

void Process::stop() {
  signal(SIGSTOP);
  siginfo_t info;
  if (::waitid(P_PID, static_cast<id_t>(pid_), &info, WSTOPPED) != 0)
    throw std::runtime_error("the process cannot be stopped");
}

void Process::kill() {
  signal(SIGKILL);
  ended();
}

int Process::ended(double seconds) {
  int status = 0;
  eventually("the end of a process", [&] { return ::waitpid(pid_, &status, WNOHANG) == pid_; }, seconds);
  reaped_ = true;
  return status;
}

}  // namespace onesided::tests
