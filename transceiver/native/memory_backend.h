// Copies between memory mapped into this process: backend SHM. Who the peers are and where their memory is mapped is
// arranged outside (`add_peer`, `add_mailbox`); here bytes are copied and notifications exchanged.
#pragma once

#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "backend.h"

namespace kvferry {

// A file descriptor and its owner.
class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept;
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor();
  int number() const { return number_; }

 private:
  int number_;
};

// Address ranges as their owner knows them, and where each is mapped here.
class RegionMap {
 public:
  void add(std::uint64_t addr, std::uint64_t nbytes, std::uint64_t mapped);
  bool remove(std::uint64_t addr, std::uint64_t nbytes);
  // Throws BackendError unless the range lies within one region.
  std::uint64_t translate(std::uint64_t addr, std::uint64_t nbytes) const;

 private:
  std::map<std::uint64_t, std::pair<std::uint64_t, std::uint64_t>> regions_;  // addr -> (nbytes, mapped)
};

class MemoryBackend : public Backend {
 public:
  using Region = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>;  // address there, bytes, address here

  // Takes over `line`, a connected packet socket to the peer. The mappings stay the caller's, until `forget_peer`.
  void add_peer(const std::string& peer, const std::vector<Region>& regions, int line);
  // Takes over `mailbox`, a packet socket on which `peer` sends notifications.
  void add_mailbox(const std::string& peer, int mailbox);

  void register_memory(std::uint64_t addr, std::uint64_t nbytes) override;
  void deregister_memory(std::uint64_t addr, std::uint64_t nbytes) override;
  std::string metadata() override { return {}; }
  void load_peer(const std::string& peer, const std::string& metadata) override;
  void forget_peer(const std::string& peer) override;
  std::unique_ptr<Operation> submit(Direction direction, const std::string& peer,
                                    const std::vector<Copy>& copies) override;
  void notify(const std::string& peer, const std::string& message) override;
  Notifications drain() override;
  void fence(const std::string& peer) override { forget_peer(peer); }
  void close() override;

 private:
  struct Peer {
    RegionMap regions;
    Descriptor line;
  };

  const Peer& reach(const std::string& peer) const;

  RegionMap local_;
  std::map<std::string, Peer> peers_;
  std::vector<std::pair<std::string, Descriptor>> mailboxes_;
};

}  // namespace kvferry
