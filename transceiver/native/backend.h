// The agent ABI in C++: what moves bytes, below the engine. Used by the engine's thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace kvferry {

// One run of bytes. For a READ they go from remote to local.
struct Copy {
  std::uint64_t local;
  std::uint64_t remote;
  std::uint64_t nbytes;
};

enum class Direction { Read, Write };

// As kvferry.transceiver.base.OpState. NotSubmitted: touches no memory (any more), and has not finished.
enum class OpState { NotSubmitted, Submitted, Done, InDoubt };

// Something the library or the peer did; becomes a TransferError.
class BackendError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The library is missing or unusable; becomes a ConfigError.
class LibraryError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Operation {
 public:
  virtual ~Operation() = default;
  // Never blocks, never throws: a failure is InDoubt.
  virtual OpState poll() = 0;
  virtual std::string error() const { return {}; }
};

class Backend {
 public:
  using Notifications = std::vector<std::pair<std::string, std::string>>;

  virtual ~Backend() = default;
  virtual void register_memory(std::uint64_t addr, std::uint64_t nbytes) = 0;
  virtual void deregister_memory(std::uint64_t addr, std::uint64_t nbytes) = 0;
  virtual std::string metadata() = 0;
  virtual void load_peer(const std::string& peer, const std::string& metadata) = 0;
  virtual void forget_peer(const std::string& peer) = 0;
  // May block for as long as the copies last.
  virtual std::unique_ptr<Operation> submit(Direction direction, const std::string& peer,
                                            const std::vector<Copy>& copies) = 0;
  virtual void notify(const std::string& peer, const std::string& message) = 0;
  // Also the chance for a backend without threads of its own to make progress.
  virtual Notifications drain() = 0;
  // Whether a notification is still on its way out of this process, which takes calls of `drain`.
  virtual bool sending() const { return false; }
  // Afterwards nothing submitted with `peer` can touch memory. May take operations with others along.
  virtual void fence(const std::string& peer) = 0;
  virtual void close() = 0;
};

}  // namespace kvferry
