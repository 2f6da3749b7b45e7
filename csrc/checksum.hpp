// Block checksum: S = sum over 32-bit words x[i] of x[i] * w(i), mod 2^64, with odd 64-bit weights
// w(i) = lane_weight(i % 1024) * stripe_weight(i / 1024).
//
// The sum is linear, so it can be computed in any order and in any launch shape, and one changed
// word (a generation) can be patched. An odd weight makes every change of a single word visible.
#pragma once

#include <cstddef>
#include <cstdint>

namespace evolving_infra {

inline constexpr std::size_t kStripeWords = 1024;

// Copies `num_words` 32-bit words and returns their part of the checksum; the words summed are
// the very words stored. `first_word` is the index of the first one in the record. `target` may be
// null: then nothing is stored. Neither pointer needs alignment.
std::uint64_t copy_sum(std::byte* target, const std::byte* source, std::size_t num_words,
                       std::size_t first_word);

// The same without AVX2, for tests and other processors.
std::uint64_t copy_sum_portable(std::byte* target, const std::byte* source, std::size_t num_words,
                                std::size_t first_word);

// "avx2" or "portable": what copy_sum runs here.
const char* copy_sum_path();

}  // namespace evolving_infra
