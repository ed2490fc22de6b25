// SHA-256 of short messages: the keys of KV blocks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace kvferry {

using Digest = std::array<std::uint8_t, 32>;
using Bytes = std::span<const std::uint8_t>;

// Processes whole 64-byte blocks.
using Compress = void (*)(std::uint32_t state[8], const std::uint8_t* data, std::size_t blocks);

// The SHA instructions' routine where this CPU has them, else the portable one; found out once.
Compress best_compress();
void compress_portable(std::uint32_t state[8], const std::uint8_t* data, std::size_t blocks);
bool sha_instructions_available();

// SHA-256 of `head` followed by `tail`.
Digest sha256(Bytes head, Bytes tail, Compress compress = best_compress());

// Digests are uniformly distributed already: any eight bytes of one are a hash.
struct DigestHash {
  std::size_t operator()(const Digest& digest) const noexcept {
    std::size_t hash;
    std::memcpy(&hash, digest.data(), sizeof hash);
    return hash;
  }
};

}  // namespace kvferry
