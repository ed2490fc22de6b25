#include "memory_backend.h"

#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

namespace kvferry {

namespace {

constexpr std::size_t kMaxPacketNbytes = 1 << 16;
constexpr int kPacketsPerDrain = 1024;  // of one mailbox: a peer that writes for ever must not hold the thread

class FinishedOperation : public Operation {
 public:
  OpState poll() override { return OpState::Done; }
};

std::string hex(std::uint64_t value) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  do {
    text.insert(text.begin(), kDigits[value & 15]);
  } while ((value >>= 4) != 0);
  return "0x" + text;
}

}  // namespace

Descriptor::Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  std::swap(number_, other.number_);
  return *this;
}

Descriptor::~Descriptor() {
  if (number_ >= 0) ::close(number_);
}

void RegionMap::add(std::uint64_t addr, std::uint64_t nbytes, std::uint64_t mapped) {
  regions_[addr] = {nbytes, mapped};
}

bool RegionMap::remove(std::uint64_t addr, std::uint64_t nbytes) {
  const auto found = regions_.find(addr);
  if (found == regions_.end() || found->second.first != nbytes) return false;
  regions_.erase(found);
  return true;
}

std::uint64_t RegionMap::translate(std::uint64_t addr, std::uint64_t nbytes) const {
  auto after = regions_.upper_bound(addr);
  if (after != regions_.begin()) {
    const auto& [start, region] = *--after;
    const std::uint64_t offset = addr - start;
    if (nbytes <= region.first && offset <= region.first - nbytes) return region.second + offset;
  }
  throw BackendError(std::to_string(nbytes) + " bytes at " + hex(addr) + " are not registered");
}

void MemoryBackend::add_peer(const std::string& peer, const std::vector<Region>& regions, int line) {
  Peer added{RegionMap(), Descriptor(line)};
  for (const auto& [addr, nbytes, mapped] : regions) added.regions.add(addr, nbytes, mapped);
  peers_.insert_or_assign(peer, std::move(added));
}

void MemoryBackend::add_mailbox(const std::string& peer, int mailbox) { mailboxes_.emplace_back(peer, mailbox); }

void MemoryBackend::register_memory(std::uint64_t addr, std::uint64_t nbytes) { local_.add(addr, nbytes, addr); }

void MemoryBackend::deregister_memory(std::uint64_t addr, std::uint64_t nbytes) {
  if (!local_.remove(addr, nbytes)) throw BackendError("that memory is not registered");
}

void MemoryBackend::load_peer(const std::string& peer, const std::string&) {
  throw BackendError("peer " + peer + " must be added with its mappings");
}

void MemoryBackend::forget_peer(const std::string& peer) { peers_.erase(peer); }

std::unique_ptr<Operation> MemoryBackend::submit(Direction direction, const std::string& peer,
                                                 const std::vector<Copy>& copies) {
  const Peer& reached = reach(peer);
  std::vector<std::pair<std::uint64_t, std::uint64_t>> ends;
  ends.reserve(copies.size());
  for (const Copy& copy : copies) {  // all of them, before the first byte moves
    ends.emplace_back(local_.translate(copy.local, copy.nbytes), reached.regions.translate(copy.remote, copy.nbytes));
  }
  for (std::size_t index = 0; index < copies.size(); ++index) {
    auto* here = reinterpret_cast<void*>(ends[index].first);
    auto* there = reinterpret_cast<void*>(ends[index].second);
    std::memcpy(direction == Direction::Read ? here : there, direction == Direction::Read ? there : here,
                copies[index].nbytes);
  }
  return std::make_unique<FinishedOperation>();
}

void MemoryBackend::notify(const std::string& peer, const std::string& message) {
  const int line = reach(peer).line.number();
  if (::send(line, message.data(), message.size(), MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
    throw BackendError("peer " + peer + " cannot be notified: " + std::strerror(errno));
  }
}

Backend::Notifications MemoryBackend::drain() {
  Notifications arrived;
  static thread_local std::array<char, kMaxPacketNbytes> packet;
  std::erase_if(mailboxes_, [&](const auto& entry) {
    for (int count = 0; count < kPacketsPerDrain; ++count) {
      const ssize_t nbytes = ::recv(entry.second.number(), packet.data(), packet.size(), MSG_DONTWAIT);
      if (nbytes < 0 && errno == EINTR) continue;
      if (nbytes <= 0) return nbytes == 0 || (errno != EAGAIN && errno != EWOULDBLOCK);
      arrived.emplace_back(entry.first, std::string(packet.data(), static_cast<std::size_t>(nbytes)));
    }
    return false;
  });
  return arrived;
}

void MemoryBackend::close() {
  peers_.clear();
  mailboxes_.clear();
}

const MemoryBackend::Peer& MemoryBackend::reach(const std::string& peer) const {
  const auto found = peers_.find(peer);
  if (found == peers_.end()) throw BackendError("peer " + peer + " is not known to the SHM agent");
  char byte = 0;  // the peer never sends on this line: anything readable is its end
  const ssize_t readable = ::recv(found->second.line.number(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  if (readable >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK)) throw BackendError("peer " + peer + " is gone");
  return found->second;
}

}  // namespace kvferry
