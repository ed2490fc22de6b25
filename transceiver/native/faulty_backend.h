// Wraps any backend and misbehaves on command: kvferry.transceiver.faulty, below the engine. For tests.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "backend.h"
#include "engine.h"

namespace kvferry {

enum class Fault { Delay, Drop, Corrupt, BlackHole, Duplicate, Block };
enum class Target { Operation, Notification };

class FaultyBackend : public Backend {
 public:
  explicit FaultyBackend(std::shared_ptr<Backend> inner) : inner_(std::move(inner)) {}

  // After `skip` more operations (or notifications), the next `count` suffer `fault`. From any thread, as the next two.
  void inject(Fault fault, Target target, int skip, int count, double delay_s);
  void fail_fences(int count);
  void unblock();

  void register_memory(std::uint64_t addr, std::uint64_t nbytes) override { inner_->register_memory(addr, nbytes); }
  void deregister_memory(std::uint64_t addr, std::uint64_t nbytes) override { inner_->deregister_memory(addr, nbytes); }
  std::string metadata() override { return inner_->metadata(); }
  void load_peer(const std::string& peer, const std::string& data) override { inner_->load_peer(peer, data); }
  void forget_peer(const std::string& peer) override { inner_->forget_peer(peer); }
  std::unique_ptr<Operation> submit(Direction direction, const std::string& peer,
                                    const std::vector<Copy>& copies) override;
  void notify(const std::string& peer, const std::string& message) override;
  Notifications drain() override;
  bool sending() const override { return inner_->sending(); }
  void fence(const std::string& peer) override;
  void close() override;

 private:
  struct Rule {
    Fault fault;
    Target target;
    int skip;
    int count;
    double delay_s;
  };
  struct Delayed {
    Clock::time_point due;
    std::string peer;
    std::string message;
  };
  struct Hole {
    std::string peer;
    std::shared_ptr<std::atomic<bool>> fenced;
  };

  std::optional<Rule> take(Target target);

  std::shared_ptr<Backend> inner_;
  std::mutex mutex_;
  std::condition_variable unblocked_;
  std::list<Rule> rules_;
  int failing_fences_ = 0;
  bool unblock_ = false;
  std::vector<Delayed> delayed_;
  std::vector<Hole> holes_;
};

}  // namespace kvferry
