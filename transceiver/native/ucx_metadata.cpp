#include "ucx_metadata.h"

#include <cstring>
#include <string_view>

#include "backend.h"

namespace kvferry {

namespace {

constexpr std::string_view kMagic = "kvferry ucx 1\n";
constexpr std::size_t kNumberNbytes = sizeof(std::uint64_t);

// FNV-1a. Tells garbage and truncation, not forgery.
std::uint64_t checksum(std::string_view data) {
  std::uint64_t sum = 0xcbf29ce484222325;
  for (const char byte : data) sum = (sum ^ static_cast<unsigned char>(byte)) * 0x100000001b3;
  return sum;
}

void put(std::string& to, std::uint64_t number) {
  to.append(reinterpret_cast<const char*>(&number), kNumberNbytes);  // one machine's byte order: UCX's own is too
}

void put(std::string& to, const std::string& text) {
  put(to, text.size());
  to += text;
}

class Reader {
 public:
  explicit Reader(std::string_view data) : rest_(data) {}

  std::string_view bytes(std::uint64_t nbytes) {
    if (nbytes > rest_.size()) throw BackendError("agent metadata that is no UCX backend's: it is cut off");
    const std::string_view taken = rest_.substr(0, nbytes);
    rest_.remove_prefix(nbytes);
    return taken;
  }
  std::uint64_t number() {
    std::uint64_t value = 0;
    std::memcpy(&value, bytes(kNumberNbytes).data(), kNumberNbytes);
    return value;
  }
  std::string text() { return std::string(bytes(number())); }
  bool at_end() const { return rest_.empty(); }

 private:
  std::string_view rest_;
};

}  // namespace

std::string encode(const UcxMetadata& metadata) {
  std::string data(kMagic);
  put(data, metadata.incarnation);
  put(data, metadata.address);
  put(data, metadata.regions.size());
  for (const UcxRegion& region : metadata.regions) {
    put(data, region.addr);
    put(data, region.nbytes);
    put(data, region.key);
  }
  put(data, checksum(data));
  return data;
}

UcxMetadata decode(const std::string& data) {
  Reader reader(data);
  if (reader.bytes(kMagic.size()) != kMagic) throw BackendError("agent metadata that is no UCX backend's");
  UcxMetadata found;
  found.incarnation = reader.text();
  found.address = reader.text();
  for (std::uint64_t left = reader.number(); left > 0; --left) {
    const std::uint64_t addr = reader.number(), nbytes = reader.number();
    found.regions.push_back({addr, nbytes, reader.text()});
  }
  const std::string_view summed(data.data(), data.size() - kNumberNbytes);
  if (reader.number() != checksum(summed) || !reader.at_end()) {
    throw BackendError("agent metadata of a UCX backend that is damaged");
  }
  return found;
}

}  // namespace kvferry
