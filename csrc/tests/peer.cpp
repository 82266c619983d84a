// The peer that tests start in a process of its own: it does what it is told, a line at a time, and answers "ok ..." or
// the name of the error and its message.
#include <iostream>
#include <sstream>

#include "tests/support.h"

namespace onesided::tests {
namespace {

struct Peer {
  std::shared_ptr<shm::ShmTransport> transport = std::make_shared<shm::ShmTransport>();
  std::vector<std::shared_ptr<Memory>> memories;
  std::vector<std::shared_ptr<Connection>> connections;
  std::vector<std::shared_ptr<Target>> targets;
  std::vector<std::thread> putting;

  std::string own(std::shared_ptr<Memory> memory) {
    memories.push_back(std::move(memory));
    return to_hex(memories.back()->remote().to_bytes());
  }

  std::string obey(std::istringstream& line) {
    std::string verb, word;
    std::uint64_t i = 0, nbytes = 0, offset = 0;
    int byte = 0;
    line >> verb;
    if (verb == "allocate" || verb == "register") {
      std::uint32_t signals = 0, slots = 0;
      line >> nbytes >> word >> signals >> slots;
      if (verb == "allocate") return own(transport->allocate(nbytes, parse_access(word), signals, slots));
      auto bytes = std::make_shared<std::vector<char>>(nbytes);
      return own(transport->register_memory(bytes->data(), nbytes, parse_access(word), signals, slots, bytes));
    }
    if (verb == "bind") return to_hex(transport->bind(true).to_bytes());
    if (verb == "connect") {
      line >> word;
      connections.push_back(transport->connect(Endpoint::from_bytes(from_hex(word)), "the test", patience()));
      return "";
    }
    if (verb == "attach") {  // connection, handle
      line >> i >> word;
      targets.push_back(connections.at(i)->attach(RemoteMemory::from_bytes(from_hex(word)), patience()));
      return "";
    }
    if (verb == "put") {  // target, offset, nbytes, byte
      line >> i >> offset >> nbytes >> byte;
      targets.at(i)->write(std::vector<char>(nbytes, static_cast<char>(byte)).data(), nbytes, offset, std::nullopt,
                           How{});
      return "";
    }
    if (verb == "signal") {
      line >> i;
      targets.at(i)->signal(Signal{0, 1}, How{});
      return "";
    }
    if (verb == "keep-putting") {  // target: all of it, over and over, until that fails
      line >> i;
      std::atomic<bool> begun{false};
      putting.emplace_back([this, i, &begun] {
        const std::vector<char> bytes(targets.at(i)->nbytes(), 'p');
        begun = true;
        while (raised([&] { targets.at(i)->write(bytes.data(), bytes.size(), 0, std::nullopt, How{}); }).empty()) {
        }
      });
      while (!begun) std::this_thread::yield();
      return "";
    }
    if (verb == "put-ended") {  // joins what keep-putting began
      for (auto& thread : putting) thread.join();
      putting.clear();
      return "";
    }
    if (verb == "fill") {
      line >> i >> byte;
      std::memset(memories.at(i)->data(), byte, memories.at(i)->nbytes());
      return "";
    }
    if (verb == "byte") {
      line >> i >> offset;
      return std::to_string(static_cast<const char*>(memories.at(i)->data())[offset]);
    }
    if (verb == "uniform") {
      line >> i;
      const char* const bytes = static_cast<const char*>(memories.at(i)->data());
      return all_are(bytes, memories.at(i)->nbytes(), bytes[0]) ? std::to_string(bytes[0]) : "mixed";
    }
    if (verb == "wait") {  // memory, at least
      std::uint64_t at_least = 0;
      line >> i >> at_least;
      return std::to_string(
          wait_signal(*memories.at(i), *counters_for("shm", ""), 0, at_least, patience(), kSpin, "a peer", [] {}));
    }
    if (verb == "close-memory") {
      line >> i;
      memories.at(i)->close(patience());
      return "";
    }
    if (verb == "close-target") {
      line >> i;
      targets.at(i)->close(patience());
      return "";
    }
    if (verb == "close-connection") {
      line >> i;
      connections.at(i)->close(patience());
      return "";
    }
    if (verb == "close") {
      transport->close(patience());
      return "";
    }
    throw std::runtime_error("what is '" + verb + "'?");
  }
};

}  // namespace

int peer_role() {
  Peer peer;
  for (std::string line; std::getline(std::cin, line);) {
    if (line == "exit") break;
    std::istringstream words(line);
    std::string answer;
    try {
      answer = "ok " + peer.obey(words);
    } catch (const Error& error) {
      answer = text(name_of(error.kind()), " ", error.what());
    } catch (const std::exception& error) {
      answer = text("unexpected ", error.what());
    }
    std::cout << answer << std::endl;
  }
  peer.transport->close(patience());
  for (auto& thread : peer.putting) thread.join();
  return 0;
}

}  // namespace onesided::tests
