// Python bindings: check arrays and ranges, release the GIL, call the native code.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

#include "block_ops.hpp"
#include "checksum.hpp"

namespace py = pybind11;

namespace evolving_infra {
namespace {

using Bytes = py::array_t<std::uint8_t, py::array::c_style>;
using Indices = py::array_t<std::int64_t, py::array::c_style>;
using Generations = py::array_t<std::uint64_t, py::array::c_style>;
using Counts = py::array_t<std::uint32_t, py::array::c_style>;
using Addresses = std::vector<std::vector<std::uintptr_t>>;

static_assert(sizeof(Key) == kKeyBytes && std::is_trivially_copyable_v<Key>);

void require(bool condition, const char* text) {
  if (!condition) throw std::invalid_argument(text);
}

WireShape make_shape(std::string_view digest, std::size_t num_layers, std::size_t page_bytes,
                     std::size_t page_size) {
  require(digest.size() == kDigestBytes, "layout digest: expected 16 bytes");
  require(num_layers > 0 && page_size > 0, "layout: expected at least one layer and one token");
  require(page_bytes > 0 && page_bytes % 4 == 0, "page_bytes: expected a multiple of 4");
  WireShape shape{{}, num_layers, page_bytes, page_size};
  std::memcpy(shape.layout.data(), digest.data(), kDigestBytes);
  return shape;
}

// A pool [num_slots, slot_bytes] of the shape's records.
std::size_t num_slots_of(const Bytes& memory, const WireShape& shape) {
  require(memory.ndim() == 2, "memory: expected [num_slots, slot_bytes]");
  require(static_cast<std::size_t>(memory.shape(1)) == shape.slot_bytes(),
          "memory: slot_bytes differs from the layout's");
  require(reinterpret_cast<std::uintptr_t>(memory.data()) % 8 == 0,
          "memory: expected 8-byte alignment");
  return static_cast<std::size_t>(memory.shape(0));
}

// References checked against a pool of `num_slots`. The arrays must outlive the result.
BlockRefs make_refs(std::string_view keys, const Indices& slots, const Generations& generations,
                    std::size_t num_slots) {
  require(slots.ndim() == 2 && generations.ndim() == 2, "slots: expected [num_blocks, shards]");
  require(slots.shape(0) == generations.shape(0) && slots.shape(1) == generations.shape(1),
          "generations: expected the shape of slots");
  const auto num_blocks = static_cast<std::size_t>(slots.shape(0));
  const auto shards = static_cast<std::size_t>(slots.shape(1));
  require(shards > 0, "slots: expected at least one shard");
  require(keys.size() == num_blocks * kKeyBytes, "keys: expected 32 bytes per block");
  for (std::size_t i = 0; i < num_blocks * shards; ++i) {
    const std::int64_t slot = slots.data()[i];
    require(slot >= 0 && static_cast<std::size_t>(slot) < num_slots, "slots: out of range");
  }
  return {num_blocks, shards, reinterpret_cast<const Key*>(keys.data()), slots.data(),
          generations.data()};
}

PoolAddresses make_pools(const Addresses& addresses, const WireShape& shape, std::size_t shards) {
  require(!addresses.empty(), "pools: expected at least one rank");
  require(shards == 1 || shards == addresses.size(), "pools: expected one rank per shard");
  PoolAddresses pools;
  for (const auto& rank : addresses) {
    require(rank.size() == shape.num_layers, "pools: expected one address per layer");
    auto& layers = pools.emplace_back();
    for (const std::uintptr_t address : rank)
      layers.push_back(reinterpret_cast<std::byte*>(address));
  }
  return pools;
}

void check_pages(const Indices& pages, std::size_t num_blocks, std::int64_t num_pages) {
  require(pages.ndim() == 1 && static_cast<std::size_t>(pages.shape(0)) == num_blocks,
          "pages: expected one per block");
  for (std::size_t i = 0; i < num_blocks; ++i)
    require(pages.data()[i] >= 0 && pages.data()[i] < num_pages, "pages: out of range");
}

std::byte* writable(Bytes& memory) { return reinterpret_cast<std::byte*>(memory.mutable_data()); }

const std::byte* readable(const Bytes& memory) {
  return reinterpret_cast<const std::byte*>(memory.data());
}

void pack(const WireShape& shape, Bytes memory, std::string_view keys, const Indices& slots,
          const Generations& generations, const Addresses& addresses, const Indices& pages,
          std::int64_t num_pages, const Counts& token_counts, std::size_t threads) {
  const BlockRefs blocks = make_refs(keys, slots, generations, num_slots_of(memory, shape));
  const PoolAddresses pools = make_pools(addresses, shape, blocks.shards);
  check_pages(pages, blocks.num_blocks, num_pages);
  require(static_cast<std::size_t>(token_counts.size()) == blocks.num_blocks,
          "token_counts: expected one per block");
  std::byte* const base = writable(memory);
  py::gil_scoped_release unlocked;
  pack_blocks(shape, base, blocks, pools, pages.data(), token_counts.data(), threads);
}

Counts unpack(const WireShape& shape, const Bytes& memory, std::string_view keys,
              const Indices& slots, const Generations& generations, const Addresses& addresses,
              const Indices& pages, std::int64_t num_pages, bool write_zeros, bool check_device,
              std::size_t threads) {
  const BlockRefs blocks = make_refs(keys, slots, generations, num_slots_of(memory, shape));
  const PoolAddresses pools = make_pools(addresses, shape, blocks.shards);
  check_pages(pages, blocks.num_blocks, num_pages);
  Counts token_counts(static_cast<py::ssize_t>(blocks.num_blocks));
  std::uint32_t* const counts = token_counts.mutable_data();
  {
    py::gil_scoped_release unlocked;
    unpack_blocks(shape, readable(memory), blocks, pools, pages.data(),
                  {write_zeros, check_device}, counts, threads);
  }
  return token_counts;
}

Bytes copy(const WireShape& shape, std::string_view keys, const Bytes& source_memory,
           const Indices& source_slots, const Generations& source_generations,
           Bytes target_memory, const Indices& target_slots,
           const Generations& target_generations, std::size_t threads) {
  const BlockRefs source = make_refs(keys, source_slots, source_generations,
                                     num_slots_of(source_memory, shape));
  const BlockRefs target = make_refs(keys, target_slots, target_generations,
                                     num_slots_of(target_memory, shape));
  require(source.shards == target.shards, "target_slots: expected the shards of source_slots");
  Bytes arrived(static_cast<py::ssize_t>(source.num_blocks));
  std::uint8_t* const flags = arrived.mutable_data();
  std::byte* const base = writable(target_memory);
  {
    py::gil_scoped_release unlocked;
    copy_blocks(shape, readable(source_memory), source, base, target, flags, threads);
  }
  return arrived;
}

std::uint64_t checksum(const Bytes& words, std::size_t first_word, bool portable) {
  require(words.nbytes() % 4 == 0, "words: expected a multiple of 4 bytes");
  const auto num_words = static_cast<std::size_t>(words.nbytes()) / 4;
  const auto sum = portable ? copy_sum_portable : copy_sum;
  return sum(nullptr, readable(words), num_words, first_word);
}

}  // namespace

PYBIND11_MODULE(_core, module) {
  module.doc() = "Native core: wire-block copies with checksums.";
  py::class_<WireShape>(module, "WireShape")
      .def(py::init(&make_shape), py::arg("digest"), py::arg("num_layers"), py::arg("page_bytes"),
           py::arg("page_size"))
      .def_property_readonly("trailer_offset", &WireShape::trailer_offset)
      .def_property_readonly("slot_bytes", &WireShape::slot_bytes);
  module.def("copy_path", &copy_sum_path);
  module.def("checksum", &checksum, py::arg("words").noconvert(), py::arg("first_word") = 0,
             py::arg("portable") = false);
  module.def("pack_blocks", &pack, py::arg("shape"), py::arg("memory").noconvert(),
             py::arg("keys"), py::arg("slots").noconvert(), py::arg("generations").noconvert(),
             py::arg("pools"), py::arg("pages").noconvert(), py::arg("num_pages"),
             py::arg("token_counts").noconvert(), py::arg("threads"));
  module.def("unpack_blocks", &unpack, py::arg("shape"), py::arg("memory").noconvert(),
             py::arg("keys"), py::arg("slots").noconvert(), py::arg("generations").noconvert(),
             py::arg("pools"), py::arg("pages").noconvert(), py::arg("num_pages"),
             py::arg("write_zeros"), py::arg("check_device"), py::arg("threads"));
  module.def("copy_blocks", &copy, py::arg("shape"), py::arg("keys"),
             py::arg("source_memory").noconvert(), py::arg("source_slots").noconvert(),
             py::arg("source_generations").noconvert(), py::arg("target_memory").noconvert(),
             py::arg("target_slots").noconvert(), py::arg("target_generations").noconvert(),
             py::arg("threads"));
}

}  // namespace evolving_infra
