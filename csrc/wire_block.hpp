// A wire block: one 64-byte aligned record `header | layer 0 rows | layer 1 rows | ... | trailer`.
//
// A writer clears the magic, writes payload, trailer and the rest of the header, and stores the
// magic last. A reader copies first and checks afterwards that the header is still the expected
// one (generations never repeat, so an unchanged one means that nobody rewrote the slot) and that
// the words it copied give the trailer's checksum. Anything else is a miss.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace evolving_infra {

inline constexpr std::uint64_t kMagic = 0x31415246'4E495645ull;  // "EVINFRA1" in memory
inline constexpr std::uint32_t kNativeCodec = 0;
inline constexpr std::size_t kKeyBytes = 32;
inline constexpr std::size_t kDigestBytes = 16;
inline constexpr std::size_t kRecordAlignment = 64;

using Key = std::array<std::uint8_t, kKeyBytes>;
using Digest = std::array<std::uint8_t, kDigestBytes>;

struct Header {
  std::uint64_t magic;
  Digest layout;
  Key key;
  std::uint64_t generation;
  std::uint32_t token_count;
  std::uint32_t codec;
  std::uint32_t shard;
  std::array<std::uint8_t, 52> reserved;
};
static_assert(sizeof(Header) == 128);

// Shape of the records of one pool, in bytes.
struct WireShape {
  Digest layout;
  std::size_t num_layers;
  std::size_t page_bytes;
  std::size_t page_size;

  std::size_t payload_bytes() const { return num_layers * page_bytes; }
  std::size_t trailer_offset() const { return (sizeof(Header) + payload_bytes() + 7) / 8 * 8; }
  std::size_t slot_bytes() const {
    return (trailer_offset() + 8 + kRecordAlignment - 1) / kRecordAlignment * kRecordAlignment;
  }
};

// What a reader expects a slot to hold.
struct Expected {
  Key key;
  std::uint64_t generation;
  std::uint32_t shard;
};

Header make_header(const WireShape& shape, const Expected& identity, std::uint32_t token_count);

// Makes the slot invalid before its payload changes.
void open_slot(std::byte* slot);

// Writes trailer and header, magic last. `payload_sum` is the payload's part of the checksum.
void publish_slot(const WireShape& shape, std::byte* slot, const Header& header,
                  std::uint64_t payload_sum);

// The header if it is the expected one, else nothing. Does not look at the payload.
std::optional<Header> read_header(const WireShape& shape, const std::byte* slot,
                                  const Expected& expected);

// True if, after the payload was copied, the slot still is what `header` says and the words copied
// give its checksum.
bool still_valid(const WireShape& shape, const std::byte* slot, const Header& header,
                 std::uint64_t payload_sum);

}  // namespace evolving_infra
