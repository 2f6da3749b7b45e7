#include "wire_block.hpp"

#include <atomic>
#include <cstring>

#include "checksum.hpp"

namespace evolving_infra {
namespace {

std::uint64_t header_sum(const Header& header) {
  return copy_sum(nullptr, reinterpret_cast<const std::byte*>(&header), sizeof(Header) / 4, 0);
}

std::uint64_t* magic_of(std::byte* slot) { return reinterpret_cast<std::uint64_t*>(slot); }

}  // namespace

Header make_header(const WireShape& shape, const Expected& identity, std::uint32_t token_count) {
  Header header{};
  header.magic = kMagic;
  header.layout = shape.layout;
  header.key = identity.key;
  header.generation = identity.generation;
  header.token_count = token_count;
  header.codec = kNativeCodec;
  header.shard = identity.shard;
  return header;
}

void open_slot(std::byte* slot) {
  __atomic_store_n(magic_of(slot), std::uint64_t{0}, __ATOMIC_RELAXED);
  std::atomic_thread_fence(std::memory_order_release);
}

void publish_slot(const WireShape& shape, std::byte* slot, const Header& header,
                  std::uint64_t payload_sum) {
  const std::uint64_t checksum = header_sum(header) + payload_sum;
  const std::size_t payload_end = sizeof(Header) + shape.payload_bytes();
  std::memset(slot + payload_end, 0, shape.trailer_offset() - payload_end);
  std::memcpy(slot + shape.trailer_offset(), &checksum, sizeof checksum);
  const auto* fields = reinterpret_cast<const std::byte*>(&header);
  std::memcpy(slot + sizeof header.magic, fields + sizeof header.magic,
              sizeof header - sizeof header.magic);
  __atomic_store_n(magic_of(slot), header.magic, __ATOMIC_RELEASE);
}

std::optional<Header> read_header(const WireShape& shape, const std::byte* slot,
                                  const Expected& expected) {
  Header header;
  const auto* magic = reinterpret_cast<const std::uint64_t*>(slot);
  const std::uint64_t found = __atomic_load_n(magic, __ATOMIC_ACQUIRE);
  std::memcpy(&header, slot, sizeof header);
  header.magic = found;
  const bool matches = header.magic == kMagic && header.layout == shape.layout &&
                       header.key == expected.key && header.generation == expected.generation &&
                       header.shard == expected.shard && header.codec == kNativeCodec &&
                       header.token_count >= 1 && header.token_count <= shape.page_size;
  if (!matches) return std::nullopt;
  return header;
}

bool still_valid(const WireShape& shape, const std::byte* slot, const Header& header,
                 std::uint64_t payload_sum) {
  std::atomic_thread_fence(std::memory_order_acquire);
  std::uint64_t trailer;
  std::memcpy(&trailer, slot + shape.trailer_offset(), sizeof trailer);
  return std::memcmp(slot, &header, sizeof header) == 0 &&
         trailer == header_sum(header) + payload_sum;
}

}  // namespace evolving_infra
