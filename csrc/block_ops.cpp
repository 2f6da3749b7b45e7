#include "block_ops.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "checksum.hpp"

namespace evolving_infra {
namespace {

// Calls work(block) for every block, on `threads` threads including this one.
template <typename Work>
void for_each_block(std::size_t num_blocks, std::size_t threads, const Work& work) {
  std::atomic<std::size_t> next{0};
  const auto drain = [&] {
    for (std::size_t block = next++; block < num_blocks; block = next++) work(block);
  };
  std::vector<std::thread> others;
  for (std::size_t i = 1; i < std::min(threads, num_blocks); ++i) others.emplace_back(drain);
  drain();
  for (std::thread& other : others) other.join();
}

std::size_t layer_offset(const WireShape& shape, std::size_t layer) {
  return sizeof(Header) + layer * shape.page_bytes;
}

// One shard of one block: the pages it goes to, on one rank or on all of them.
struct PageTarget {
  const PoolAddresses& pools;
  std::size_t first_rank;
  std::size_t last_rank;
  std::size_t page;

  std::byte* at(std::size_t rank, std::size_t layer, std::size_t page_bytes) const {
    return pools[rank][layer] + page * page_bytes;
  }
};

// The first rank's page is copied and summed, the others are copied from it: all ranks hold the
// words that were summed, even if the record changes meanwhile.
std::uint64_t spread_layers(const WireShape& shape, const std::byte* slot,
                            const PageTarget& target) {
  std::uint64_t sum = 0;
  for (std::size_t layer = 0; layer < shape.num_layers; ++layer) {
    const std::size_t offset = layer_offset(shape, layer);
    std::byte* const first = target.at(target.first_rank, layer, shape.page_bytes);
    sum += copy_sum(first, slot + offset, shape.page_bytes / 4, offset / 4);
    for (std::size_t rank = target.first_rank + 1; rank < target.last_rank; ++rank)
      std::memcpy(target.at(rank, layer, shape.page_bytes), first, shape.page_bytes);
  }
  return sum;
}

void zero_pages(const WireShape& shape, const PageTarget& target) {
  for (std::size_t rank = target.first_rank; rank < target.last_rank; ++rank)
    for (std::size_t layer = 0; layer < shape.num_layers; ++layer)
      std::memset(target.at(rank, layer, shape.page_bytes), 0, shape.page_bytes);
}

bool pages_hold(const WireShape& shape, const PageTarget& target, std::uint64_t payload_sum) {
  for (std::size_t rank = target.first_rank; rank < target.last_rank; ++rank) {
    std::uint64_t sum = 0;
    for (std::size_t layer = 0; layer < shape.num_layers; ++layer)
      sum += copy_sum(nullptr, target.at(rank, layer, shape.page_bytes), shape.page_bytes / 4,
                      layer_offset(shape, layer) / 4);
    if (sum != payload_sum) return false;
  }
  return true;
}

// Token count of the shard, 0 for a miss.
std::uint32_t unpack_shard(const WireShape& shape, const std::byte* slot,
                           const Expected& expected, const PageTarget& target,
                           const RestoreOptions& options) {
  const auto header = read_header(shape, slot, expected);
  if (!header) return 0;
  const std::uint64_t sum = spread_layers(shape, slot, target);
  if (!still_valid(shape, slot, *header, sum)) return 0;
  if (options.write_zeros) zero_pages(shape, target);
  if (options.check_device && !pages_hold(shape, target, sum)) return 0;
  return header->token_count;
}

bool copy_shard(const WireShape& shape, const std::byte* source, const Expected& expected,
                std::byte* target, std::uint64_t generation) {
  open_slot(target);
  auto header = read_header(shape, source, expected);
  if (!header) return false;
  const std::uint64_t sum =
      copy_sum(target + sizeof(Header), source + sizeof(Header), shape.payload_bytes() / 4,
               sizeof(Header) / 4);
  if (!still_valid(shape, source, *header, sum)) return false;
  header->generation = generation;
  publish_slot(shape, target, *header, sum);
  return true;
}

}  // namespace

void pack_blocks(const WireShape& shape, std::byte* memory, const BlockRefs& blocks,
                 const PoolAddresses& pools, const std::int64_t* pages,
                 const std::uint32_t* token_counts, std::size_t threads) {
  for_each_block(blocks.num_blocks, threads, [&](std::size_t block) {
    const auto page = static_cast<std::size_t>(pages[block]);
    for (std::size_t shard = 0; shard < blocks.shards; ++shard) {
      std::byte* const slot = memory + blocks.slot(block, shard) * shape.slot_bytes();
      open_slot(slot);
      std::uint64_t sum = 0;
      for (std::size_t layer = 0; layer < shape.num_layers; ++layer) {
        const std::size_t offset = layer_offset(shape, layer);
        sum += copy_sum(slot + offset, pools[shard][layer] + page * shape.page_bytes,
                        shape.page_bytes / 4, offset / 4);
      }
      const Expected identity = blocks.expected(block, shard);
      publish_slot(shape, slot, make_header(shape, identity, token_counts[block]), sum);
    }
  });
}

void unpack_blocks(const WireShape& shape, const std::byte* memory, const BlockRefs& blocks,
                   const PoolAddresses& pools, const std::int64_t* pages,
                   const RestoreOptions& options, std::uint32_t* token_counts,
                   std::size_t threads) {
  for_each_block(blocks.num_blocks, threads, [&](std::size_t block) {
    std::uint32_t count = 0;
    for (std::size_t shard = 0; shard < blocks.shards; ++shard) {
      const std::size_t last = blocks.shards == 1 ? pools.size() : shard + 1;
      const PageTarget target{pools, shard, last, static_cast<std::size_t>(pages[block])};
      const std::byte* const slot = memory + blocks.slot(block, shard) * shape.slot_bytes();
      const std::uint32_t got =
          unpack_shard(shape, slot, blocks.expected(block, shard), target, options);
      if (shard == 0) count = got;
      if (got != count) count = 0;  // a shard is missing, or shards of different lengths
      if (count == 0) break;
    }
    token_counts[block] = count;
  });
}

void copy_blocks(const WireShape& shape, const std::byte* source_memory, const BlockRefs& source,
                 std::byte* target_memory, const BlockRefs& target, std::uint8_t* arrived,
                 std::size_t threads) {
  for_each_block(source.num_blocks, threads, [&](std::size_t block) {
    bool all = true;
    for (std::size_t shard = 0; shard < source.shards; ++shard) {
      const std::byte* const from =
          source_memory + source.slot(block, shard) * shape.slot_bytes();
      std::byte* const into = target_memory + target.slot(block, shard) * shape.slot_bytes();
      const std::uint64_t generation = target.generations[block * target.shards + shard];
      all = copy_shard(shape, from, source.expected(block, shard), into, generation) && all;
    }
    arrived[block] = all;
  });
}

}  // namespace evolving_infra
