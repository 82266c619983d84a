#include "verbs/protocol.h"

#if ONESIDED_HAS_VERBS
#include <algorithm>
#include <cstring>

#include "net/framed.h"

namespace onesided::verbs {
namespace {

constexpr std::uint32_t kMagic = 0x3152534F;  // "OSR1"

void put_gid(ByteWriter& writer, const ibv_gid& gid) {
  Token raw;
  std::memcpy(raw.data(), gid.raw, raw.size());
  writer.put(raw);
}

ibv_gid get_gid(ByteReader& reader) {
  const Token raw = reader.get_token();
  ibv_gid gid{};
  std::memcpy(gid.raw, raw.data(), raw.size());
  return gid;
}

void put_keys(ByteWriter& writer, const std::vector<std::uint32_t>& keys) {
  writer.put(static_cast<std::uint32_t>(keys.size()));
  for (const std::uint32_t key : keys) writer.put(key);
}

// Grows as it reads: a count that lies about what follows ends in a HandleError, not in an allocation.
std::vector<std::uint32_t> get_keys(ByteReader& reader) {
  const auto count = reader.get<std::uint32_t>();
  if (count > kMostKeys) fail(ErrorKind::Handle, "a message names ", count, " keys (", kMostKeys, " at most)");
  std::vector<std::uint32_t> keys;
  for (std::uint32_t i = 0; i < count; ++i) keys.push_back(reader.get<std::uint32_t>());
  return keys;
}

// At most 255 bytes, and no letter in halves.
std::string_view cut(std::string_view text) {
  std::size_t length = std::min<std::size_t>(text.size(), 255);
  while (length > 0 && length < text.size() && (static_cast<unsigned char>(text[length]) & 0xC0) == 0x80) --length;
  return text.substr(0, length);
}

std::uint8_t get_count(ByteReader& reader) {
  const auto count = reader.get<std::uint8_t>();
  if (count > kMostLanes)
    fail(ErrorKind::Handle, "a message names ", unsigned{count}, " rails (", kMostLanes, " at most)");
  return count;
}

}  // namespace

std::string Message::to_bytes() const {
  ByteWriter writer;
  writer.put(kMagic);
  writer.put(kHandleVersion);
  writer.put(static_cast<std::uint8_t>(say));
  writer.put(request_id);
  switch (say) {
    case Say::Hello:
      writer.put(id);
      writer.put(token);
      writer.put(pid);
      break;
    case Say::Welcome:
      writer.put(static_cast<std::uint8_t>(rails.size()));
      for (const RailAddress& rail : rails) {
        put_gid(writer, rail.gid);
        writer.put(rail.lid);
        writer.put(rail.mtu);
      }
      break;
    case Say::Open:
    case Say::Opened:
      writer.put(generation);
      writer.put(static_cast<std::uint8_t>(pairs.size()));
      for (const PairRequest& pair : pairs) {
        writer.put(pair.local_rail);
        writer.put(pair.remote_rail);
        put_gid(writer, pair.address.gid);
        writer.put(pair.address.lid);
        writer.put(pair.address.mtu);
        writer.put(pair.address.number);
        writer.put(pair.address.first_packet);
        writer.put(pair.address.reads);
      }
      break;
    case Say::Attach:
      writer.put(id);
      writer.put(token);
      break;
    case Say::Attached:
      if (reach.keys.size() + reach.words_keys.size() > kMostKeys) {
        fail(ErrorKind::Unsupported, "this memory has ", reach.keys.size(), " regions, too many for one message");
      }
      writer.put(reach.nbytes);
      writer.put(static_cast<std::uint8_t>(reach.access));
      writer.put(reach.signals);
      writer.put(reach.address);
      writer.put(reach.piece_nbytes);
      writer.put(reach.words_address);
      put_keys(writer, reach.keys);
      put_keys(writer, reach.words_keys);
      break;
    case Say::Detach:
    case Say::Revoke:
    case Say::Revoked:
    case Say::Ended:
    case Say::Renew: writer.put(id); break;
    case Say::Failed:
      writer.put(static_cast<std::uint8_t>(error));
      writer.put(cut(text));
      break;
  }
  return std::move(writer).finish();
}

Message Message::from_bytes(std::string_view bytes) {
  ByteReader reader(bytes, "a message", net::kLongestFrame);
  if (reader.get<std::uint32_t>() != kMagic)
    fail(ErrorKind::Handle, "these bytes are not a message of rdma transports");
  if (const auto version = reader.get<std::uint16_t>(); version != kHandleVersion) {
    fail(ErrorKind::Handle, "the peer speaks version ", version, " of the protocol, this library version ",
         kHandleVersion);
  }
  Message message;
  message.say = static_cast<Say>(reader.get<std::uint8_t>());
  message.request_id = reader.get<std::uint64_t>();
  switch (message.say) {
    case Say::Hello:
      message.id = reader.get<std::uint64_t>();
      message.token = reader.get_token();
      message.pid = reader.get<std::uint32_t>();
      break;
    case Say::Welcome:
      for (unsigned left = get_count(reader); left > 0; --left) {
        RailAddress rail;
        rail.gid = get_gid(reader);
        rail.lid = reader.get<std::uint16_t>();
        rail.mtu = reader.get<std::uint8_t>();
        message.rails.push_back(rail);
      }
      break;
    case Say::Open:
    case Say::Opened:
      message.generation = reader.get<std::uint32_t>();
      for (unsigned left = get_count(reader); left > 0; --left) {
        PairRequest pair;
        pair.local_rail = reader.get<std::uint8_t>();
        pair.remote_rail = reader.get<std::uint8_t>();
        pair.address.gid = get_gid(reader);
        pair.address.lid = reader.get<std::uint16_t>();
        pair.address.mtu = reader.get<std::uint8_t>();
        pair.address.number = reader.get<std::uint32_t>();
        pair.address.first_packet = reader.get<std::uint32_t>() & 0xFFFFFF;
        pair.address.reads = reader.get<std::uint8_t>();
        if (pair.address.mtu < IBV_MTU_256 || pair.address.mtu > IBV_MTU_4096) {
          fail(ErrorKind::Handle, "a message names an unknown MTU");
        }
        message.pairs.push_back(pair);
      }
      break;
    case Say::Attach:
      message.id = reader.get<std::uint64_t>();
      message.token = reader.get_token();
      break;
    case Say::Attached: {
      Reach& reach = message.reach;
      reach.nbytes = reader.get<std::uint64_t>();
      reach.access = static_cast<Access>(reader.get<std::uint8_t>() & 3);
      reach.signals = reader.get<std::uint32_t>();
      reach.address = reader.get<std::uint64_t>();
      reach.piece_nbytes = reader.get<std::uint64_t>();
      reach.words_address = reader.get<std::uint64_t>();
      reach.keys = get_keys(reader);
      reach.words_keys = get_keys(reader);
      if (reach.piece_nbytes == 0) fail(ErrorKind::Handle, "a message describes a memory in pieces of no bytes");
      if (reach.address + reach.nbytes < reach.address ||
          (reach.nbytes != 0 && (reach.nbytes - 1) / reach.piece_nbytes >= kMostKeys)) {
        fail(ErrorKind::Handle, "a message describes a memory that cannot be");
      }
      break;
    }
    case Say::Detach:
    case Say::Revoke:
    case Say::Revoked:
    case Say::Ended:
    case Say::Renew: message.id = reader.get<std::uint64_t>(); break;
    case Say::Failed: {
      const auto kind = reader.get<std::uint8_t>();
      message.error = kind < kErrorKinds ? static_cast<ErrorKind>(kind) : ErrorKind::Onesided;
      message.text = reader.get_name();
      break;
    }
    default: fail(ErrorKind::Handle, "unknown message ", static_cast<unsigned>(message.say));
  }
  reader.finish();
  return message;
}

}  // namespace onesided::verbs
#endif
