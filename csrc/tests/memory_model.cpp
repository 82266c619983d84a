// Scatter and gather, fences, narrow words and the permissions of single peers, on shm and on the fake of verbs alike.
#include <numeric>

#include "tests/fake_verbs.h"
#include "tests/support.h"
#include "verbs/transport.h"

namespace onesided::tests {
namespace {

// Two transports of one kind, a memory of b's, and three peers that reach it from a: two with names, and anybody.
struct Peers {
  static constexpr std::uint64_t kBytes = 1 << 20;

#if ONESIDED_HAS_VERBS
  std::optional<fake::InUse> in_use;
#endif
  std::shared_ptr<Transport> a, b;
  std::shared_ptr<Memory> memory;
  std::vector<std::shared_ptr<Connection>> connections;
  std::vector<std::shared_ptr<Target>> targets;

  Peers(const std::string& kind, unsigned rails) {
    if (kind == "shm") {
      a = std::make_shared<shm::ShmTransport>();
      b = std::make_shared<shm::ShmTransport>();
    } else {
#if ONESIDED_HAS_VERBS
      in_use.emplace(fake::default_machine(rails));
      verbs::RdmaOptions options;
      options.address = "127.0.0.1";
      a = std::make_shared<verbs::RdmaTransport>(options);
      b = std::make_shared<verbs::RdmaTransport>(options);
#endif
    }
    memory = b->allocate(kBytes, Access::ReadWrite, 4, 8);
    for (const char* const name : {"one", "two", ""}) connect(name);
  }
  Target& connect(const char* name) {
    connections.push_back(a->connect(b->bind(false, name), "b", patience()));
    targets.push_back(connections.back()->attach(memory->remote(), patience()));
    return *targets.back();
  }
  ~Peers() {
    targets.clear();
    connections.clear();
    memory = nullptr;
    a = b = nullptr;
  }
  char* bytes() const { return static_cast<char*>(memory->data()); }
  std::uint64_t signal(unsigned index) const { return memory->control().signal(index).load(); }
};

How how(bool async = false) {
  How how;
  how.async = async;
  how.deadline = patience();
  return how;
}

void finish(const std::shared_ptr<Work>& work) {
  if (work != nullptr) work->wait(patience());
}

template <class Body>
void on_every_kind(const Body& body) {
#if ONESIDED_HAS_VERBS
  constexpr bool verbs = true;
#else
  constexpr bool verbs = false;
#endif
  for (const auto& [kind, rails] : {std::pair("shm", 1u), std::pair("rdma", 1u), std::pair("rdma", 2u)}) {
    if (!verbs && std::string(kind) == "rdma") continue;
    CAPTURE(kind);
    CAPTURE(rails);
    Peers peers(kind, rails);
    body(peers);
  }
}

TEST_CASE("memory model: scattered pieces arrive with their signal, and come back") {
  on_every_kind([](Peers& peers) {
    Target& target = *peers.targets[2];
    std::mt19937 random(7);
    for (const bool async : {false, true, false}) {
      std::memset(peers.bytes(), 0, Peers::kBytes);
      std::vector<char> model(Peers::kBytes, 0);
      const auto source = random_bytes(Peers::kBytes, async ? 1 : 2);
      std::vector<Piece> pieces;
      for (std::uint64_t at = 0; at < Peers::kBytes;) {
        const std::uint64_t nbytes = std::min<std::uint64_t>(Peers::kBytes - at, pieces.size() == 5  ? 300'000
                                                                                 : random() % 3 == 0 ? random() % 9000
                                                                                                     : random() % 64);
        pieces.push_back({const_cast<char*>(source.data()) + (Peers::kBytes - at - nbytes), nbytes, at});
        if (nbytes != 0) std::memcpy(model.data() + at, pieces.back().data, nbytes);
        at += nbytes + random() % 100;
      }
      std::shuffle(pieces.begin(), pieces.end(), random);
      const std::uint64_t before = peers.signal(1);
      finish(target.write_many(pieces, Signal{1, 2}, how(async)));
      target.flush(patience());
      CHECK(peers.signal(1) == before + 2);
      CHECK(std::memcmp(peers.bytes(), model.data(), Peers::kBytes) == 0);
      std::vector<char> back(Peers::kBytes, 0);
      for (Piece& piece : pieces) piece.data = back.data() + piece.offset;
      finish(target.read_many(pieces, how(async)));
      CHECK(std::memcmp(back.data(), model.data(), Peers::kBytes) == 0);
    }
    // One that is wrong, and nothing has happened.
    char byte = 1;
    const std::vector<Piece> wrong{{&byte, 1, 0}, {&byte, 1, Peers::kBytes}};
    CHECK(raised([&] { target.write_many(wrong, Signal{1, 1}, how()); }) == "Bounds");
    CHECK(raised([&] { target.write_many({wrong.data(), 1}, Signal{4, 1}, how()); }) == "Bounds");
    CHECK(raised([&] { target.read_many(wrong, how()); }) == "Bounds");
    finish(target.write_many({}, std::nullopt, how(true)));
    CHECK(peers.signal(1) == 6);
  });
}

TEST_CASE("memory model: swaps and words of four bytes, from all sides at once") {
  on_every_kind([](Peers& peers) {
    const unsigned n = rounds(200);
    std::vector<std::vector<std::uint64_t>> taken(3);
    side_by_side(3, [&](unsigned i) {
      Target& target = *peers.targets[i];
      for (unsigned k = 0; k < n; ++k) {
        target.atomic({Atomic::Kind::FetchAdd, 8, 1, 0, 4}, patience());
        target.atomic({Atomic::Kind::FetchAdd, 12, 0xFFFFFFFF, 0, 4}, patience());
        taken[i].push_back(target.atomic({Atomic::Kind::Swap, 16, 1 + i * 1000 + k}, patience()));
      }
    });
    std::uint32_t halves[2];
    std::memcpy(halves, peers.bytes() + 8, sizeof halves);
    CHECK(halves[0] == 3 * n);
    CHECK(halves[1] == static_cast<std::uint32_t>(0) - 3 * n);
    std::vector<std::uint64_t> all{peers.targets[0]->fetch_add(16, 0)};
    for (const auto& part : taken) all.insert(all.end(), part.begin(), part.end());
    std::sort(all.begin(), all.end());
    CHECK(all.front() == 0);
    CHECK(std::adjacent_find(all.begin(), all.end()) == all.end());
    CHECK(all.size() == 3 * n + 1);
    Target& target = *peers.targets[0];
    CHECK(target.atomic({Atomic::Kind::CompareSwap, 24, 7, 1, 4}, patience()) == 0);
    CHECK(target.atomic({Atomic::Kind::CompareSwap, 24, 7, 0, 4}, patience()) == 0);
    CHECK(target.atomic({Atomic::Kind::CompareSwap, 24, 8, 7, 4}, patience()) == 7);
    CHECK(target.fetch_add(24, 0) == 8);
    for (const std::uint64_t offset : {std::uint64_t{2}, Peers::kBytes - 2, Peers::kBytes, UINT64_MAX - 3}) {
      CHECK(raised([&] { target.atomic({Atomic::Kind::Swap, offset, 1, 0, 4}, patience()); }) == "Bounds");
    }
  });
}

TEST_CASE("memory model: what is behind a fence comes after what was before it") {
  on_every_kind([](Peers& peers) {
    Target& target = *peers.targets[0];
    std::vector<char> source(512 << 10);
    for (unsigned turn = 1; turn < rounds(40); ++turn) {
      std::memset(source.data(), static_cast<int>(turn), source.size());
      const auto work = target.write(source.data(), source.size(), 0, std::nullopt, how(true));
      target.fence();
      target.atomic({Atomic::Kind::Swap, Peers::kBytes - 8, turn}, patience());
      CHECK(peers.bytes()[0] == static_cast<char>(turn));
      CHECK(peers.bytes()[source.size() - 1] == static_cast<char>(turn));
      work->wait(patience());
    }
    target.close(patience());
    CHECK(raised([&] { target.fence(); }) == "StaleHandle");
  });
}

TEST_CASE("memory model: a peer loses its access while the others use theirs") {
  on_every_kind([](Peers& peers) {
    std::atomic<bool> done{false};
    std::atomic<unsigned> gone{0};
    std::thread owner([&] {
      for (unsigned i = 0; i < 5; ++i) {
        const std::uint64_t seen = peers.signal(3);
        if (!happens([&] { return peers.signal(3) > seen + 20; })) break;
        peers.memory->revoke(i == 2 ? "one" : "a stranger", patience());
        if (i != 2) continue;
        const std::uint64_t count = peers.signal(0);
        CHECK(happens([&] { return gone.load() == 1; }));
        CHECK(peers.signal(0) == count);
      }
      done.store(true);
    });
    side_by_side(3, [&](unsigned i) {
      Target& target = *peers.targets[i];
      const std::vector<char> source(9000, static_cast<char>(i + 1));
      const std::string error = raised([&] {
        while (!done.load()) {
          finish(target.write(source.data(), source.size(), i * 10'000, Signal{i, 1}, how(i == 1)));
          target.signal(Signal{3, 1}, how());
          target.flush(patience());
        }
      });
      if (i == 0) gone.store(1);
      CHECK(error == (i == 0 ? "StaleHandle" : ""));
    });
    owner.join();
    CHECK(raised([&] { peers.connect("one"); }) == "RemoteAccess");
    peers.memory->permit("one", Access::Read);
    Target& again = peers.connect("one");
    char byte = 0;
    again.read(&byte, 1, 10'000, how());
    CHECK(byte == 2);
    CHECK(raised([&] { again.write(&byte, 1, 0, std::nullopt, how()); }) == "RemoteAccess");
    peers.memory->permit("", Access::None);
    CHECK(raised([&] { peers.connect(""); }) == "RemoteAccess");
    CHECK(raised([&] { peers.connect("nobody knows"); }) == "RemoteAccess");
    peers.targets[2]->write(&byte, 1, 0, std::nullopt, how());  // it had its rights before
    peers.memory->close(patience());
    CHECK(raised([&] { peers.memory->revoke("two", patience()); }) == "StaleHandle");
    CHECK(raised([&] { peers.memory->permit("two", Access::Write); }) == "StaleHandle");
  });
}

TEST_CASE("memory model: no more can be permitted than the memory is for") {
  on_every_kind([](Peers& peers) {
    const auto readable = peers.b->allocate(4096, Access::Read, 1, 8);
    CHECK(raised([&] { readable->permit("one", Access::ReadWrite); }) == "RemoteAccess");
    readable->permit("one", Access::None);
    CHECK(raised([&] { peers.connections[0]->attach(readable->remote(), patience()); }) == "RemoteAccess");
    peers.connections[1]->attach(readable->remote(), patience());
  });
}

}  // namespace
}  // namespace onesided::tests
