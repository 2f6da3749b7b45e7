// Moves of whole blocks: device pages -> records, records -> device pages, records -> records.
// Addresses and indices were checked by the caller. Work is spread over blocks by threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "wire_block.hpp"

namespace evolving_infra {

// Blocks in a mapped pool. Arrays are [num_blocks] for keys and [num_blocks * shards] otherwise.
struct BlockRefs {
  std::size_t num_blocks;
  std::size_t shards;
  const Key* keys;
  const std::int64_t* slots;
  const std::uint64_t* generations;

  Expected expected(std::size_t block, std::size_t shard) const {
    return {keys[block], generations[block * shards + shard], static_cast<std::uint32_t>(shard)};
  }
  std::size_t slot(std::size_t block, std::size_t shard) const {
    return static_cast<std::size_t>(slots[block * shards + shard]);
  }
};

// First byte of every layer's pool on every rank: [rank][layer].
using PoolAddresses = std::vector<std::vector<std::byte*>>;

// Writes page `pages[i]` of rank s as shard s of block i.
void pack_blocks(const WireShape& shape, std::byte* memory, const BlockRefs& blocks,
                 const PoolAddresses& pools, const std::int64_t* pages,
                 const std::uint32_t* token_counts, std::size_t threads);

struct RestoreOptions {
  bool write_zeros;    // the fault that a device check must notice
  bool check_device;   // read the pages back and check them against the record
};

// Writes block i to page `pages[i]`: shard s to rank s, or shard 0 to all ranks if there is only
// one. Stores the block's token count, 0 for a miss; the pages of a miss hold anything.
void unpack_blocks(const WireShape& shape, const std::byte* memory, const BlockRefs& blocks,
                   const PoolAddresses& pools, const std::int64_t* pages,
                   const RestoreOptions& options, std::uint32_t* token_counts,
                   std::size_t threads);

// Copies records of a peer's pool into own slots, with the own slots' generations. Stores 1 for a
// block whose shards all arrived. The slots of a miss stay invalid.
void copy_blocks(const WireShape& shape, const std::byte* source_memory, const BlockRefs& source,
                 std::byte* target_memory, const BlockRefs& target, std::uint8_t* arrived,
                 std::size_t threads);

}  // namespace evolving_infra
