// What a peer needs to reach a UCX backend: who it is, its worker's address, its memory and the keys to it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvferry {

struct UcxRegion {
  std::uint64_t addr;
  std::uint64_t nbytes;
  std::string key;  // packed, for the peer to unpack
};

struct UcxMetadata {
  std::string incarnation;
  std::string address;
  std::vector<UcxRegion> regions;
};

std::string encode(const UcxMetadata& metadata);
// Throws BackendError for anything `encode` has not made: UCX itself trusts what it is given.
UcxMetadata decode(const std::string& data);

}  // namespace kvferry
