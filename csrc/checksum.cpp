#include "checksum.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace evolving_infra {
namespace {

constexpr std::size_t kGroupWords = 8;

// SplitMix64 output function: a fixed, well mixed 64-bit value per index.
constexpr std::uint64_t mix(std::uint64_t index) {
  std::uint64_t z = (index + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

constexpr std::uint64_t lane_weight(std::uint64_t lane) { return mix(lane) | 1; }
constexpr std::uint64_t stripe_weight(std::uint64_t stripe) { return mix(~stripe) | 1; }

using LaneWeights = std::array<std::uint64_t, kStripeWords>;

constexpr LaneWeights make_lane_weights() {
  LaneWeights weights{};
  for (std::size_t lane = 0; lane < kStripeWords; ++lane) weights[lane] = lane_weight(lane);
  return weights;
}

// In each group of 8 words the even ones first: a 256-bit load holds words 0 2 4 6 in the low
// halves of its 64-bit lanes and words 1 3 5 7 in the high halves.
constexpr LaneWeights make_grouped_weights() {
  LaneWeights weights{};
  for (std::size_t lane = 0; lane < kStripeWords; ++lane) {
    const std::size_t in_group = lane % kGroupWords;
    const std::size_t place = in_group / 2 + (in_group % 2) * (kGroupWords / 2);
    weights[lane - in_group + place] = lane_weight(lane);
  }
  return weights;
}

constexpr LaneWeights kLaneWeights = make_lane_weights();
alignas(32) constexpr LaneWeights kGroupedWeights = make_grouped_weights();

// One run inside a stripe: sum of x[k] * lane_weight(lane + k).
template <bool kStore>
std::uint64_t run_portable(std::byte* target, const std::byte* source, std::size_t num_words,
                           std::size_t lane) {
  std::uint64_t sum = 0;
  for (std::size_t k = 0; k < num_words; ++k) {
    std::uint32_t word;
    std::memcpy(&word, source + 4 * k, 4);
    if constexpr (kStore) std::memcpy(target + 4 * k, &word, 4);
    sum += word * kLaneWeights[lane + k];
  }
  return sum;
}

#if defined(__x86_64__)
// `lane` is a multiple of 8. 64-bit weight = low + 2^32 * high: two 32x32 products per word.
template <bool kStore>
__attribute__((target("avx2"))) std::uint64_t run_avx2(std::byte* target, const std::byte* source,
                                                       std::size_t num_words, std::size_t lane) {
  __m256i low = _mm256_setzero_si256();
  __m256i high = _mm256_setzero_si256();
  std::size_t k = 0;
  for (; k + kGroupWords <= num_words; k += kGroupWords) {
    const __m256i words =
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + 4 * k));
    if constexpr (kStore)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + 4 * k), words);
    const __m256i odd_words = _mm256_srli_epi64(words, 32);
    const auto* weights = reinterpret_cast<const __m256i*>(kGroupedWeights.data() + lane + k);
    const __m256i even = _mm256_load_si256(weights);
    const __m256i odd = _mm256_load_si256(weights + 1);
    low = _mm256_add_epi64(low, _mm256_mul_epu32(words, even));
    low = _mm256_add_epi64(low, _mm256_mul_epu32(odd_words, odd));
    high = _mm256_add_epi64(high, _mm256_mul_epu32(words, _mm256_srli_epi64(even, 32)));
    high = _mm256_add_epi64(high, _mm256_mul_epu32(odd_words, _mm256_srli_epi64(odd, 32)));
  }
  const __m256i total = _mm256_add_epi64(low, _mm256_slli_epi64(high, 32));
  std::array<std::uint64_t, 4> lanes;
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes.data()), total);
  const std::uint64_t sum = lanes[0] + lanes[1] + lanes[2] + lanes[3];
  std::byte* const rest = kStore ? target + 4 * k : target;
  return sum + run_portable<kStore>(rest, source + 4 * k, num_words - k, lane + k);
}

bool has_avx2() {
  static const bool has = __builtin_cpu_supports("avx2");
  return has;
}
#else
bool has_avx2() { return false; }
#endif

template <bool kStore>
std::uint64_t run(std::byte* target, const std::byte* source, std::size_t num_words,
                  std::size_t lane, bool avx2) {
#if defined(__x86_64__)
  if (avx2 && lane % kGroupWords == 0) return run_avx2<kStore>(target, source, num_words, lane);
#endif
  static_cast<void>(avx2);
  return run_portable<kStore>(target, source, num_words, lane);
}

template <bool kStore>
std::uint64_t stripes(std::byte* target, const std::byte* source, std::size_t num_words,
                      std::size_t first_word, bool avx2) {
  std::uint64_t sum = 0;
  for (std::size_t done = 0; done < num_words;) {
    const std::size_t lane = (first_word + done) % kStripeWords;
    const std::size_t stripe = (first_word + done) / kStripeWords;
    const std::size_t count = std::min(kStripeWords - lane, num_words - done);
    std::byte* const into = kStore ? target + 4 * done : target;
    sum += stripe_weight(stripe) * run<kStore>(into, source + 4 * done, count, lane, avx2);
    done += count;
  }
  return sum;
}

std::uint64_t dispatch(std::byte* target, const std::byte* source, std::size_t num_words,
                       std::size_t first_word, bool avx2) {
  if (target == nullptr) return stripes<false>(target, source, num_words, first_word, avx2);
  return stripes<true>(target, source, num_words, first_word, avx2);
}

}  // namespace

std::uint64_t copy_sum(std::byte* target, const std::byte* source, std::size_t num_words,
                       std::size_t first_word) {
  return dispatch(target, source, num_words, first_word, has_avx2());
}

std::uint64_t copy_sum_portable(std::byte* target, const std::byte* source, std::size_t num_words,
                                std::size_t first_word) {
  return dispatch(target, source, num_words, first_word, false);
}

const char* copy_sum_path() { return has_avx2() ? "avx2" : "portable"; }

}  // namespace evolving_infra
