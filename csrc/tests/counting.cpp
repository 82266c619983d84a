#include "core/owner.h"
#include "core/stats.h"
#include "tests/support.h"

namespace onesided::tests {
namespace {

TEST_CASE("stats: exact with any number of threads, also when threads end and others take their place") {
  Counters counters;
  std::atomic<bool> stop{false};
  std::uint64_t last = 0;
  bool shrank = false;
  std::jthread reader([&] {
    while (!stop) {
      const std::uint64_t now = counters.get(Count::Puts);
      shrank |= now < last;
      last = now;
    }
  });
  const unsigned n = rounds(50000);
  for (unsigned generation = 0; generation < 4; ++generation) {
    side_by_side(4, [&](unsigned thread) {
      for (unsigned i = 0; i < n; ++i) {
        counters.add(Count::Puts);
        counters.add(Count::BytesPut, thread);
      }
    });
  }
  stop = true;
  reader.join();
  CHECK(counters.get(Count::Puts) == 4u * 4 * n);
  CHECK(counters.get(Count::BytesPut) == std::uint64_t{4} * n * (0 + 1 + 2 + 3));
  CHECK(counters.get(Count::Errors) == 0);
  CHECK_FALSE(shrank);
}

TEST_CASE("stats: one row a transport and peer, that outlives who counted") {
  counters_for("test", "x")->add(Count::Gets, 3);
  counters_for("test", "x")->add(Count::Gets, 4);
  counters_for("test", "")->add(Count::Errors);
  unsigned rows = 0;
  for (const StatsRow& row : stats_snapshot()) {
    if (row.transport != "test") continue;
    ++rows;
    CHECK(row.counts.size() == kCountNames.size());
    for (const auto& [name, count] : row.counts) {
      CHECK(count == (row.peer == "x" && name == "gets" ? 7u : row.peer == "" && name == "errors" ? 1u : 0u));
    }
  }
  CHECK(rows == 2);
}

TEST_CASE("stats: the first thread that asks owns; no other does while it lives") {
  OwnedBy owned;
  CHECK(owned.is_me());
  std::atomic<unsigned> owners{0};
  side_by_side(4, [&](unsigned) { owners += owned.is_me(); });
  CHECK(owners == 0);
  CHECK(owned.is_me());

  OwnedBy contended;
  std::atomic<bool> all_asked{false};
  std::atomic<unsigned> asked{0};
  side_by_side(4, [&](unsigned) {
    owners += contended.is_me();
    if (++asked == 4) all_asked = true;
    while (!all_asked) std::this_thread::yield();  // none ends before all have asked
  });
  CHECK(owners == 1);
}

TEST_CASE("process: a lost peer keeps its first reason") {
  PeerState peer("rank 3");
  const std::uint64_t before = losses();
  CHECK_FALSE(peer.lost());
  side_by_side(4, [&](unsigned) { peer.lose("it fell over"); });
  peer.lose("something else");
  CHECK(peer.lost());
  CHECK(losses() == before + 1);
  CHECK(raised([&] { peer.fail_lost("put"); }) == "ConnectionLost");
  const std::string message = said([&] { peer.fail_lost("put"); });
  CHECK(contains(message, "put"));
  CHECK(contains(message, "rank 3"));
  CHECK(contains(message, "it fell over"));
}

}  // namespace
}  // namespace onesided::tests
