#include "core/bytes.h"

#include <sys/random.h>

#include <cerrno>

namespace onesided {

Token random_token() {
  Token token;
  std::size_t have = 0;
  while (have < token.size()) {
    const ssize_t got = ::getrandom(token.data() + have, token.size() - have, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail_errno(ErrorKind::Onesided, errno, "no random bytes to be had");
    have += static_cast<std::size_t>(got);
  }
  return token;
}

std::uint32_t crc32(std::string_view bytes) {
  std::uint32_t crc = ~0u;
  for (const char byte : bytes) {
    crc ^= static_cast<std::uint8_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0xEDB88320u : 0u);
  }
  return ~crc;
}

bool same_secret(const Token& one, const Token& other) {
  unsigned differences = 0;
  for (std::size_t i = 0; i < one.size(); ++i) differences |= one[i] ^ other[i];
  return differences == 0;
}

std::string hex(const Token& token) {
  static constexpr char digits[] = "0123456789abcdef";
  std::string out;
  for (const std::uint8_t byte : token) {
    out.push_back(digits[byte >> 4]);
    out.push_back(digits[byte & 15]);
  }
  return out;
}

}  // namespace onesided
