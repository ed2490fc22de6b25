#include "sha256.h"

#include <algorithm>
#include <bit>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace kvferry {
namespace {

constexpr std::size_t kBlock = 64;

alignas(16) constexpr std::uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

std::uint32_t load_big_endian(const std::uint8_t* at) {
  return std::uint32_t{at[0]} << 24 | std::uint32_t{at[1]} << 16 | std::uint32_t{at[2]} << 8 | at[3];
}

void store_big_endian(std::uint8_t* at, std::uint64_t value, int nbytes) {
  for (int index = 0; index < nbytes; ++index) {
    at[index] = static_cast<std::uint8_t>(value >> (8 * (nbytes - 1 - index)));
  }
}

#if defined(__x86_64__)
__attribute__((target("sha,sse4.1,ssse3"))) void compress_instructions(std::uint32_t state[8],
                                                                       const std::uint8_t* data,
                                                                       std::size_t blocks) {
  const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
  // The instructions want the state as (a, b, e, f) and (c, d, g, h), highest word first.
  __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state));
  __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state + 4));
  low = _mm_shuffle_epi32(low, 0xB1);
  high = _mm_shuffle_epi32(high, 0x1B);
  __m128i abef = _mm_alignr_epi8(low, high, 8);
  __m128i cdgh = _mm_blend_epi16(high, low, 0xF0);
  for (; blocks > 0; --blocks, data += kBlock) {
    const __m128i abef_before = abef;
    const __m128i cdgh_before = cdgh;
    __m128i words[4];
    for (int four = 0; four < 16; ++four) {
      __m128i& now = words[four & 3];
      if (four < 4) {
        now = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data) + four), swap);
      } else {
        const __m128i newest = words[(four + 3) & 3];
        now = _mm_sha256msg1_epu32(now, words[(four + 1) & 3]);
        now = _mm_add_epi32(now, _mm_alignr_epi8(newest, words[(four + 2) & 3], 4));
        now = _mm_sha256msg2_epu32(now, newest);
      }
      __m128i added = _mm_add_epi32(now, _mm_load_si128(reinterpret_cast<const __m128i*>(kRound) + four));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, added);
      added = _mm_shuffle_epi32(added, 0x0E);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, added);
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  low = _mm_shuffle_epi32(abef, 0x1B);
  high = _mm_shuffle_epi32(cdgh, 0xB1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state), _mm_blend_epi16(low, high, 0xF0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state + 4), _mm_alignr_epi8(high, low, 8));
}
#endif

}  // namespace

void compress_portable(std::uint32_t state[8], const std::uint8_t* data, std::size_t blocks) {
  for (; blocks > 0; --blocks, data += kBlock) {
    std::uint32_t words[64];
    for (int t = 0; t < 16; ++t) words[t] = load_big_endian(data + 4 * t);
    for (int t = 16; t < 64; ++t) {
      const std::uint32_t w15 = words[t - 15];
      const std::uint32_t w2 = words[t - 2];
      const std::uint32_t s0 = std::rotr(w15, 7) ^ std::rotr(w15, 18) ^ (w15 >> 3);
      const std::uint32_t s1 = std::rotr(w2, 17) ^ std::rotr(w2, 19) ^ (w2 >> 10);
      words[t] = words[t - 16] + s0 + words[t - 7] + s1;
    }
    auto [a, b, c, d, e, f, g, h] = std::array{state[0], state[1], state[2], state[3],
                                               state[4], state[5], state[6], state[7]};
    for (int t = 0; t < 64; ++t) {
      const std::uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
      const std::uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRound[t] + words[t];
      const std::uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
      const std::uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    state[0] += a, state[1] += b, state[2] += c, state[3] += d;
    state[4] += e, state[5] += f, state[6] += g, state[7] += h;
  }
}

bool sha_instructions_available() {
#if defined(__x86_64__)
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return false;
  const bool sse = (ecx & bit_SSE4_1) != 0 && (ecx & bit_SSSE3) != 0;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  constexpr unsigned sha = 1u << 29;
  return sse && (ebx & sha) != 0;
#else
  return false;
#endif
}

Compress best_compress() {
#if defined(__x86_64__)
  static const Compress chosen = sha_instructions_available() ? compress_instructions : compress_portable;
  return chosen;
#else
  return compress_portable;
#endif
}

Digest sha256(Bytes head, Bytes tail, Compress compress) {
  std::uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                            0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::uint8_t pending[2 * kBlock] = {};
  std::size_t held = 0;
  for (Bytes part : {head, tail}) {
    if (held > 0) {
      const std::size_t used = std::min(kBlock - held, part.size());
      if (used > 0) std::memcpy(pending + held, part.data(), used);
      held += used;
      part = part.subspan(used);
      if (held == kBlock) compress(state, pending, 1), held = 0;
    }
    if (held == 0) {
      const std::size_t whole = part.size() / kBlock;
      compress(state, part.data(), whole);
      part = part.subspan(whole * kBlock);
      held = part.size();
      if (held > 0) std::memcpy(pending, part.data(), held);
    }
  }
  pending[held] = 0x80;
  const std::size_t padded = held + 9 <= kBlock ? kBlock : 2 * kBlock;
  std::memset(pending + held + 1, 0, padded - held - 1);
  store_big_endian(pending + padded - 8, 8 * std::uint64_t{head.size() + tail.size()}, 8);
  compress(state, pending, padded / kBlock);
  Digest digest;
  for (int word = 0; word < 8; ++word) store_big_endian(digest.data() + 4 * word, state[word], 4);
  return digest;
}

}  // namespace kvferry
