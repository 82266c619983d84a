#include "core/handle.h"

#include "tests/support.h"

namespace onesided::tests {
namespace {

Token token(std::uint64_t seed) {
  Token made;
  const auto bytes = random_bytes(made.size(), seed);
  std::copy(bytes.begin(), bytes.end(), made.begin());
  return made;
}

RemoteMemory some_memory(std::uint64_t seed = 1) {
  return {TransportKind::Shm, Access::ReadWrite, token(seed), seed * 77, seed * 4096, seed << 20, 16, token(seed + 1)};
}

Endpoint some_endpoint(std::uint64_t seed = 1, std::string address = "onesided-0123456789abcdef") {
  return {TransportKind::Shm, seed % 2 == 0,   token(seed), token(seed + 1),
          seed * 3,           token(seed + 2), 4242,        std::move(address)};
}

// The string with its body changed and a checksum that fits again.
std::string resealed(std::string bytes, const std::function<void(std::string&)>& change) {
  bytes.resize(bytes.size() - 4);
  change(bytes);
  const std::uint32_t sum = crc32(bytes);
  for (unsigned i = 0; i < 4; ++i) bytes += static_cast<char>(sum >> (8 * i));
  return bytes;
}

struct Format {
  const char* name;
  std::string sample;
  std::function<std::string(std::string_view)> reread;  // what it says, written again
};

std::vector<Format> formats() {
  return {{"handle", some_memory().to_bytes(),
           [](std::string_view bytes) { return RemoteMemory::from_bytes(bytes).to_bytes(); }},
          {"endpoint", some_endpoint().to_bytes(),
           [](std::string_view bytes) { return Endpoint::from_bytes(bytes).to_bytes(); }}};
}

TEST_CASE("handle: what is written is read again") {
  for (std::uint64_t seed = 1; seed < 200; ++seed) {
    RemoteMemory memory = some_memory(seed);
    memory.kind = static_cast<TransportKind>(seed % 3 + 1);
    memory.access = static_cast<Access>(seed % 3 + 1);
    memory.offset = seed % 5 == 0 ? UINT64_MAX - memory.nbytes : memory.offset;
    const RemoteMemory read = RemoteMemory::from_bytes(memory.to_bytes());
    CHECK(read.kind == memory.kind);
    CHECK(read.access == memory.access);
    CHECK(read.transport == memory.transport);
    CHECK(read.memory_id == memory.memory_id);
    CHECK(read.offset == memory.offset);
    CHECK(read.nbytes == memory.nbytes);
    CHECK(read.signals == memory.signals);
    CHECK(read.key == memory.key);

    const Endpoint endpoint = some_endpoint(seed, std::string(seed, 'n'));
    const Endpoint again = Endpoint::from_bytes(endpoint.to_bytes());
    CHECK(again.kind == endpoint.kind);
    CHECK(again.shared == endpoint.shared);
    CHECK(again.transport == endpoint.transport);
    CHECK(again.host == endpoint.host);
    CHECK(again.endpoint_id == endpoint.endpoint_id);
    CHECK(again.secret == endpoint.secret);
    CHECK(again.pid == endpoint.pid);
    CHECK(again.address == endpoint.address);
  }
}

TEST_CASE("handle: every truncation, flipped bit and extension is a HandleError") {
  for (const Format& format : formats()) {
    CAPTURE(format.name);
    CHECK(format.reread(format.sample) == format.sample);
    unsigned accepted = 0;
    const auto attempt = [&](const std::string& bytes) {
      accepted += raised([&] { format.reread(bytes); }) != "Handle";
    };
    for (std::size_t n = 0; n < format.sample.size(); ++n) attempt(format.sample.substr(0, n));
    for (std::size_t n = 1; n < format.sample.size(); ++n) attempt(format.sample.substr(n));
    for (std::size_t bit = 0; bit < 8 * format.sample.size(); ++bit) {
      std::string flipped = format.sample;
      flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
      attempt(flipped);
    }
    for (std::size_t n = 1; n <= 2000; n += n < 20 ? 1 : 97) {
      attempt(format.sample + std::string(n, '\0'));
      attempt(format.sample + format.sample.substr(0, n));
      attempt(std::string(n, '\0') + format.sample);
      // Too long with a checksum that fits.
      attempt(resealed(format.sample, [&](std::string& bytes) { bytes += std::string(n, '\0'); }));
    }
    CHECK(accepted == 0);
  }
}

TEST_CASE("handle: wrong magic, version, kind, access or flag is a HandleError even with a checksum that fits") {
  for (const Format& format : formats()) {
    CAPTURE(format.name);
    const auto with = [&](std::size_t at, char value) {
      return raised([&] { format.reread(resealed(format.sample, [&](std::string& bytes) { bytes.at(at) = value; })); });
    };
    for (std::size_t at = 0; at < 4; ++at) CHECK(with(at, '?') == "Handle");
    CHECK(with(4, 0) == "Handle");
    CHECK(with(4, 2) == "Handle");
    CHECK(with(5, 1) == "Handle");
    for (const char kind : {0, 4, 127, -1}) CHECK(with(6, kind) == "Handle");
    for (const char kind : {1, 2, 3}) CHECK(with(6, kind) == "");
    for (const char value : {4, 127, -1}) CHECK(with(7, value) == "Handle");  // access; whether the endpoint is shared
  }
  CHECK(raised([&] {
          RemoteMemory::from_bytes(resealed(some_memory().to_bytes(), [](std::string& bytes) { bytes[7] = 0; }));
        }) == "Handle");
  CHECK(raised([] { RemoteMemory::from_bytes(some_endpoint().to_bytes()); }) == "Handle");
  CHECK(raised([] { Endpoint::from_bytes(some_memory().to_bytes()); }) == "Handle");
  CHECK(contains(said([&] {
                   RemoteMemory::from_bytes(
                       resealed(some_memory().to_bytes(), [](std::string& bytes) { bytes[4] = 9; }));
                 }),
                 "version 9"));
}

TEST_CASE("handle: a range that overflows is a HandleError, one that just does not is none") {
  RemoteMemory memory = some_memory();
  memory.offset = UINT64_MAX - 9, memory.nbytes = 9;
  CHECK(raised([&] { RemoteMemory::from_bytes(memory.to_bytes()); }) == "");
  memory.nbytes = 11;
  CHECK(raised([&] { RemoteMemory::from_bytes(memory.to_bytes()); }) == "Handle");
  memory.offset = memory.nbytes = UINT64_MAX;
  CHECK(raised([&] { RemoteMemory::from_bytes(memory.to_bytes()); }) == "Handle");
}

TEST_CASE("handle: names from empty to the longest; a length field that lies is a HandleError") {
  for (const std::size_t n : {0, 1, 107, 255}) {
    CHECK(Endpoint::from_bytes(some_endpoint(1, std::string(n, 'x')).to_bytes()).address.size() == n);
  }
  CHECK(raised([] { some_endpoint(1, std::string(256, 'x')).to_bytes(); }) == "Handle");
  const std::string sample = some_endpoint(1, "abc").to_bytes();
  const std::size_t length_at = sample.size() - 4 - 3 - 1;
  REQUIRE(sample[length_at] == 3);
  for (const char length : {0, 2, 4, 127, -1}) {
    CHECK(raised([&] {
            Endpoint::from_bytes(resealed(sample, [&](std::string& bytes) { bytes[length_at] = length; }));
          }) == "Handle");
  }
}

TEST_CASE("handle: random strings are HandleErrors, with and without a checksum that fits") {
  std::mt19937_64 random(7);
  unsigned accepted = 0;
  for (unsigned i = 0; i < rounds(20000); ++i) {
    const std::size_t nbytes = random() % (i % 50 == 0 ? 3000 : 150);
    const auto bytes = random_bytes(nbytes, random());
    std::string string(bytes.begin(), bytes.end());
    if (i % 2 == 0 && string.size() >= 4) string = resealed(string, [](std::string&) {});
    // Half of those look right up to the kind.
    if (i % 4 == 0 && string.size() >= 12) {
      string =
          resealed(string, [&](std::string& body) { body.replace(0, 7, formats()[i % 8 == 0].sample.substr(0, 7)); });
    }
    for (const Format& format : formats()) {
      const std::string outcome = raised([&] { format.reread(string); });
      if (outcome == "Handle") continue;
      // By chance it may be right; then it says what it holds.
      accepted += outcome != "" || format.reread(string) != string;
    }
  }
  CHECK(accepted == 0);
}

TEST_CASE("handle: access and bounds") {
  CHECK(parse_access("r") == Access::Read);
  CHECK(parse_access("w") == Access::Write);
  CHECK(parse_access("rw") == Access::ReadWrite);
  for (const char* letters : {"", "x", "wr", "rwx", "R"}) CHECK(raised([&] { parse_access(letters); }) == "Layout");
  CHECK(permits(Access::ReadWrite, Access::Read));
  CHECK_FALSE(permits(Access::Read, Access::Write));
  CHECK_FALSE(permits(Access::Write, Access::ReadWrite));

  const auto bounds = [](std::uint64_t offset, std::uint64_t nbytes, std::uint64_t limit) {
    return raised([&] { check_bounds("put", "b", offset, nbytes, limit); });
  };
  constexpr std::uint64_t top = UINT64_MAX;
  CHECK(bounds(0, 0, 0) == "");
  CHECK(bounds(8, 0, 8) == "");
  CHECK(bounds(0, 8, 8) == "");
  CHECK(bounds(1, 8, 8) == "Bounds");
  CHECK(bounds(9, 0, 8) == "Bounds");
  CHECK(bounds(4, top - 3, 8) == "Bounds");
  CHECK(bounds(top, 1, 8) == "Bounds");
  CHECK(bounds(top, top, 8) == "Bounds");
  CHECK(bounds(top - 1, 1, top) == "");
  CHECK(bounds(top, 1, top) == "Bounds");
}

}  // namespace
}  // namespace onesided::tests
