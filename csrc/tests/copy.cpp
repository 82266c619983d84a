#include "core/copy.h"

#include <algorithm>

#include "tests/support.h"

namespace onesided::tests {
namespace {

constexpr std::size_t kGuard = 64;

// A target with guards before and after, at any alignment; the oracle is that exactly the bytes asked for change.
struct Room {
  std::vector<char> bytes;
  std::size_t nbytes;
  char* target;

  Room(std::size_t n, std::size_t alignment) : bytes(n + 4 * kGuard + 4096, '#'), nbytes(n) {
    auto at = (reinterpret_cast<std::uintptr_t>(bytes.data()) + kGuard + 63) / 64 * 64 + alignment;
    target = reinterpret_cast<char*>(at);
  }
  bool holds(const char* source) const {
    return std::memcmp(target, source, nbytes) == 0 &&
           all_are(bytes.data(), static_cast<std::size_t>(target - bytes.data()), '#') &&
           all_are(target + nbytes, static_cast<std::size_t>(bytes.data() + bytes.size() - target) - nbytes, '#');
  }
};

const std::vector<char>& plenty() {
  static const std::vector<char> bytes = random_bytes(3 * kPiece + 4096, 1);
  return bytes;
}

struct Counting final : Checkpoint {
  unsigned passes = 0;
  unsigned most = ~0u;
  void pass() override {
    if (++passes > most) fail(ErrorKind::DeadlineExceeded, "enough");
  }
};

TEST_CASE("copy: every small size at every alignment of source and target") {
  unsigned wrong = 0;
  for (std::size_t nbytes = 0; nbytes <= 4100; ++nbytes) {
    const std::size_t to = nbytes % 65, from = (nbytes * 7) % 67;
    Room room(nbytes, to);
    copy_memory(room.target, plenty().data() + from, nbytes);
    wrong += !room.holds(plenty().data() + from);
  }
  CHECK(wrong == 0);
}

TEST_CASE("copy: sizes around every threshold, by whatever method is chosen") {
  constexpr std::size_t mib = 1 << 20;
  for (const std::size_t around : {kLargeCopy, 4 * mib, kPiece, 2 * kPiece, kPiece + kLargeCopy}) {
    for (const int step : {-65, -1, 0, 1, 4097}) {
      const std::size_t nbytes = around + static_cast<std::size_t>(step), to = nbytes % 61, from = nbytes % 59;
      CAPTURE(nbytes);
      Room room(nbytes, to);
      copy_memory(room.target, plenty().data() + from, nbytes);
      CHECK(room.holds(plenty().data() + from));
    }
  }
}

TEST_CASE("copy: each method by itself") {
  REQUIRE(copy_methods().front() == "plain");
  for (const std::string& method : copy_methods()) {
    for (const std::size_t nbytes : {0ul, 1ul, 63ul, 4096ul, 8 * 4096ul - 1, 8 * 4096ul, 8 * 4096ul + 63,
                                     (256ul << 10) - 1, (256ul << 10) + 1, kLargeCopy + 12345, kPiece}) {
      for (const std::size_t to : {0, 1, 32, 63}) {
        CAPTURE(method);
        CAPTURE(nbytes);
        CAPTURE(to);
        const char* const source = plenty().data() + (to * 3 + nbytes) % 64;
        Room room(nbytes, to);
        copy_memory_by(method, room.target, source, nbytes);
        CHECK(room.holds(source));
      }
    }
  }
  CHECK(raised([] { copy_memory_by("by hand", nullptr, nullptr, 0); }) == "Unsupported");
}

TEST_CASE("copy: overlapping ranges, both ways, as memmove") {
  for (const std::size_t nbytes : {2ul, 100ul, 5000ul, kLargeCopy - 1, kLargeCopy + 7, kPiece + kLargeCopy + 3}) {
    for (const std::size_t shift :
         {std::size_t{0}, std::size_t{1}, std::min<std::size_t>(4096, nbytes - 1), nbytes - 1, nbytes}) {
      CAPTURE(nbytes);
      CAPTURE(shift);
      std::vector<char> bytes(plenty().begin(), plenty().begin() + static_cast<std::ptrdiff_t>(nbytes + shift));
      copy_memory(bytes.data() + shift, bytes.data(), nbytes);
      CHECK(std::memcmp(bytes.data() + shift, plenty().data(), nbytes) == 0);
      CHECK(std::memcmp(bytes.data(), plenty().data(), shift) == 0);

      bytes.assign(plenty().begin(), plenty().begin() + static_cast<std::ptrdiff_t>(nbytes + shift));
      copy_memory(bytes.data(), bytes.data() + shift, nbytes);
      CHECK(std::memcmp(bytes.data(), plenty().data() + shift, nbytes) == 0);
      CHECK(std::memcmp(bytes.data() + nbytes, plenty().data() + nbytes, shift) == 0);
    }
  }
}

TEST_CASE("copy: several threads at once share one helper") {
  side_by_side(3, [](unsigned thread) {
    const std::size_t nbytes = (2 << 20) + 4096 * thread + 5;
    std::vector<char> source = random_bytes(nbytes, thread + 10), target(nbytes);
    for (unsigned round = 0; round < rounds(60); ++round) {
      std::memset(source.data() + round * 1000, static_cast<int>(round), 1000);
      const auto& methods = copy_methods();
      if (round % 2 == 0) {
        copy_memory(target.data(), source.data(), nbytes);
      } else {
        copy_memory_by(methods[round / 2 % methods.size()], target.data(), source.data(), nbytes);
      }
      if (std::memcmp(target.data(), source.data(), nbytes) != 0) throw std::runtime_error("a copy is wrong");
    }
  });
}

TEST_CASE("copy: comes up between pieces, and reads nothing more once it was stopped there") {
  std::vector<char> source(2 * kPiece + 100), target(source.size());
  Counting counting;
  copy_memory(target.data(), source.data(), source.size(), &counting);
  CHECK(counting.passes == 2);

  // As often as it takes to go through every method.
  for (unsigned round = 0; round < 12; ++round) {
    std::memset(source.data(), 'o', source.size());
    std::memset(target.data(), '-', target.size());
    Counting once;
    once.most = 1;
    CHECK(raised([&] { copy_memory(target.data(), source.data(), source.size(), &once); }) == "DeadlineExceeded");
    std::memset(source.data(), 'n', source.size());
    CHECK(all_are(target.data(), kPiece, 'o'));
    CHECK(all_are(target.data() + kPiece, target.size() - kPiece, '-'));
  }
}

TEST_CASE("copy: comes up between the pieces of ranges that overlap, too") {
  std::vector<char> bytes(2 * kPiece + 200);
  for (const bool forwards : {true, false}) {
    char* const target = bytes.data() + (forwards ? 0 : 100);
    char* const source = bytes.data() + (forwards ? 100 : 0);
    Counting counting;
    copy_memory(target, source, 2 * kPiece + 100, &counting);
    CHECK(counting.passes == 2);
    // Stopped after the first piece, which was at that end of the target where the copy begins.
    std::memset(bytes.data(), 'o', bytes.size());
    std::memset(forwards ? bytes.data() : source + 2 * kPiece + 100, '-', 100);
    Counting once;
    once.most = 1;
    CHECK(raised([&] { copy_memory(target, source, 2 * kPiece + 100, &once); }) == "DeadlineExceeded");
    CHECK(all_are(bytes.data(), bytes.size(), 'o'));
  }
}

TEST_CASE("copy: tells what it has measured") {
  for (const std::size_t nbytes : {kLargeCopy, std::size_t{4} << 20}) {
    std::vector<char> target(nbytes);
    // Long enough for a trial of each method.
    for (unsigned i = 0; i < 65; ++i) copy_memory(target.data(), plenty().data(), nbytes);
  }
  const auto rows = copy_measurements();
  for (const std::string sizes : {"1-4 MiB", "4-16 MiB"}) {
    CAPTURE(sizes);
    std::vector<std::string> methods;
    unsigned chosen = 0;
    for (const auto& row : rows) {
      if (row.sizes != sizes) continue;
      methods.push_back(row.method);
      chosen += row.chosen;
      CHECK(row.gigabytes_per_second > 0);
    }
    // All that this machine has, but that a helper thread which never came in time has not been measured.
    for (const std::string& method : copy_methods()) {
      const bool measured = std::find(methods.begin(), methods.end(), method) != methods.end();
      if (method.find("two threads") == std::string::npos) CHECK(measured);
    }
    for (const std::string& method : methods) {
      const auto known = copy_methods();
      CHECK(std::find(known.begin(), known.end(), method) != known.end());
    }
    CHECK(chosen == 1);
  }
}

}  // namespace
}  // namespace onesided::tests
