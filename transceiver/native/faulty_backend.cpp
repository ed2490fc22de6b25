#include "faulty_backend.h"

#include <utility>

namespace kvferry {

namespace {

class FailedOperation : public Operation {
 public:
  explicit FailedOperation(std::shared_ptr<std::atomic<bool>> fenced) : fenced_(std::move(fenced)) {}
  OpState poll() override { return *fenced_ ? OpState::NotSubmitted : OpState::InDoubt; }
  std::string error() const override { return "an operation that fails on command"; }

 private:
  std::shared_ptr<std::atomic<bool>> fenced_;
};

class HoleOperation : public Operation {
 public:
  explicit HoleOperation(std::shared_ptr<std::atomic<bool>> fenced) : fenced_(std::move(fenced)) {}
  OpState poll() override { return *fenced_ ? OpState::NotSubmitted : OpState::Submitted; }

 private:
  std::shared_ptr<std::atomic<bool>> fenced_;
};

class DelayedOperation : public Operation {
 public:
  DelayedOperation(std::unique_ptr<Operation> inner, Clock::time_point due) : inner_(std::move(inner)), due_(due) {}
  OpState poll() override {
    const OpState state = inner_->poll();
    return state == OpState::Done && Clock::now() < due_ ? OpState::Submitted : state;
  }
  std::string error() const override { return inner_->error(); }

 private:
  std::unique_ptr<Operation> inner_;
  Clock::time_point due_;
};

class CorruptingOperation : public Operation {
 public:
  CorruptingOperation(std::unique_ptr<Operation> inner, std::vector<Copy> copies)
      : inner_(std::move(inner)), pending_(std::move(copies)) {}
  OpState poll() override {
    const OpState state = inner_->poll();
    if (state == OpState::Done) {
      for (const Copy& copy : pending_) *reinterpret_cast<unsigned char*>(copy.local) ^= 0xFF;
      pending_.clear();
    }
    return state;
  }
  std::string error() const override { return inner_->error(); }

 private:
  std::unique_ptr<Operation> inner_;
  std::vector<Copy> pending_;
};

}  // namespace

void FaultyBackend::inject(Fault fault, Target target, int skip, int count, double delay_s) {
  const std::scoped_lock lock(mutex_);
  rules_.push_back({fault, target, skip, count, delay_s});
}

void FaultyBackend::fail_fences(int count) {
  const std::scoped_lock lock(mutex_);
  failing_fences_ += count;
}

void FaultyBackend::unblock() {
  const std::scoped_lock lock(mutex_);
  unblock_ = true;
  unblocked_.notify_all();
}

// The rule that applies to this call. A rule counts only the calls that reach it.
std::optional<FaultyBackend::Rule> FaultyBackend::take(Target target) {
  const std::scoped_lock lock(mutex_);
  for (auto rule = rules_.begin(); rule != rules_.end(); ++rule) {
    if (rule->target != target) continue;
    if (rule->skip > 0) {
      --rule->skip;
      return std::nullopt;
    }
    const Rule taken = *rule;
    if (--rule->count == 0) rules_.erase(rule);
    return taken;
  }
  return std::nullopt;
}

std::unique_ptr<Operation> FaultyBackend::submit(Direction direction, const std::string& peer,
                                                 const std::vector<Copy>& copies) {
  const auto rule = take(Target::Operation);
  if (!rule) return inner_->submit(direction, peer, copies);
  if (rule->fault == Fault::BlackHole || rule->fault == Fault::Drop) {
    holes_.push_back({peer, std::make_shared<std::atomic<bool>>(false)});
    if (rule->fault == Fault::BlackHole) return std::make_unique<HoleOperation>(holes_.back().fenced);
    return std::make_unique<FailedOperation>(holes_.back().fenced);
  }
  if (rule->fault == Fault::Block) {
    std::unique_lock lock(mutex_);
    unblocked_.wait(lock, [this] { return unblock_; });
  }
  if (rule->fault == Fault::Duplicate) inner_->submit(direction, peer, copies);
  auto operation = inner_->submit(direction, peer, copies);
  if (rule->fault == Fault::Corrupt) return std::make_unique<CorruptingOperation>(std::move(operation), copies);
  if (rule->fault != Fault::Delay) return operation;
  const auto delay = std::chrono::duration_cast<Clock::duration>(Seconds(rule->delay_s));
  return std::make_unique<DelayedOperation>(std::move(operation), Clock::now() + delay);
}

void FaultyBackend::notify(const std::string& peer, const std::string& message) {
  const auto rule = take(Target::Notification);
  if (!rule) return inner_->notify(peer, message);
  std::string sent = message;
  switch (rule->fault) {
    case Fault::Delay:
      delayed_.push_back({Clock::now() + std::chrono::duration_cast<Clock::duration>(Seconds(rule->delay_s)), peer, sent});
      return;
    case Fault::Drop:
    case Fault::BlackHole:
      return;
    case Fault::Corrupt:
      sent[0] = static_cast<char>(sent[0] ^ 0xFF);
      break;
    case Fault::Duplicate:
      inner_->notify(peer, sent);
      break;
    case Fault::Block:
      break;
  }
  inner_->notify(peer, sent);
}

Backend::Notifications FaultyBackend::drain() {
  std::erase_if(delayed_, [this](const Delayed& entry) {
    if (Clock::now() < entry.due) return false;
    inner_->notify(entry.peer, entry.message);
    return true;
  });
  return inner_->drain();
}

void FaultyBackend::fence(const std::string& peer) {
  {
    const std::scoped_lock lock(mutex_);
    if (failing_fences_ > 0) {
      --failing_fences_;
      throw BackendError("a fence that fails on command");
    }
  }
  inner_->fence(peer);
  for (const Hole& hole : holes_) {
    if (hole.peer == peer) *hole.fenced = true;
  }
}

void FaultyBackend::close() { inner_->close(); }

}  // namespace kvferry
