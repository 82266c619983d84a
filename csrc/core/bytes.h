// Reading and writing the little-endian byte strings that travel: handles and endpoints.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "core/error.h"

namespace onesided {

using Token = std::array<std::uint8_t, 16>;

// 16 bytes from the kernel's random number generator.
Token random_token();
// Takes equally long wherever the first difference is, so that nobody finds a secret byte by byte.
bool same_secret(const Token& one, const Token& other);
// CRC-32 (ISO-HDLC, as in zlib): finds every flipped bit and every burst of up to 32.
std::uint32_t crc32(std::string_view bytes);
std::string hex(const Token& token);

class ByteWriter {
 public:
  template <class Integer, std::enable_if_t<std::is_integral_v<Integer>, int> = 0>
  void put(Integer value) {
    for (unsigned i = 0; i < sizeof value; ++i) {
      bytes_.push_back(static_cast<char>(static_cast<std::uint64_t>(value) >> (8 * i)));
    }
  }
  void put(const Token& token) { bytes_.append(token.begin(), token.end()); }
  // A length of one byte, then the text.
  void put(std::string_view name) {
    if (name.size() > 255)
      fail(ErrorKind::Handle, "a name of ", name.size(), " bytes does not fit a handle (255 at most)");
    put(static_cast<std::uint8_t>(name.size()));
    bytes_.append(name);
  }
  // Ends the string with its checksum.
  std::string finish() && {
    put(crc32(bytes_));
    return std::move(bytes_);
  }

 private:
  std::string bytes_;
};

// Reads what ByteWriter wrote. Every short read, and any byte left over or altered, is a HandleError that says `what`.
class ByteReader {
 public:
  // Checks size and checksum first, so that whatever is read afterwards was written by a ByteWriter.
  ByteReader(std::string_view bytes, const char* what, std::size_t longest) : what_(what) {
    if (bytes.size() > longest) {
      fail(ErrorKind::Handle, what_, " of ", bytes.size(), " bytes is too long (", longest, " at most)");
    }
    if (bytes.size() < 4) fail(ErrorKind::Handle, what_, " of ", bytes.size(), " bytes is too short");
    rest_ = bytes.substr(bytes.size() - 4);
    const auto stored = get<std::uint32_t>();
    rest_ = bytes.substr(0, bytes.size() - 4);
    if (crc32(rest_) != stored) fail(ErrorKind::Handle, what_, " is damaged: its checksum does not fit");
  }

  template <class Integer>
  Integer get() {
    std::string_view raw = take(sizeof(Integer));
    std::uint64_t value = 0;
    for (unsigned i = 0; i < sizeof(Integer); ++i) {
      value |= static_cast<std::uint64_t>(static_cast<std::uint8_t>(raw[i])) << (8 * i);
    }
    return static_cast<Integer>(value);
  }
  Token get_token() {
    std::string_view raw = take(sizeof(Token));
    Token token;
    std::copy(raw.begin(), raw.end(), token.begin());
    return token;
  }
  std::string get_name() {
    const auto length = get<std::uint8_t>();
    return std::string(take(length));
  }
  void finish() const {
    if (!rest_.empty()) fail(ErrorKind::Handle, what_, " has ", rest_.size(), " bytes too many");
  }

 private:
  std::string_view take(std::size_t n) {
    if (rest_.size() < n) fail(ErrorKind::Handle, what_, " is cut short");
    std::string_view taken = rest_.substr(0, n);
    rest_.remove_prefix(n);
    return taken;
  }

  const char* what_;
  std::string_view rest_;
};

}  // namespace onesided
