#include "engine.h"

#include <algorithm>
#include <utility>

namespace kvferry {

namespace {

// As kvferry.transceiver.polling: looking costs a fixed small share of what is waited for.
constexpr double kShare = 1.0 / 20;
constexpr double kOperationMin = 20e-6, kOperationMax = 1e-3;
constexpr double kExpectedMin = 0.2e-3, kExpectedMax = 10e-3;
constexpr double kAttention = 0.5e-3;

Clock::duration interval(Clock::time_point since, Clock::time_point now, double low, double high) {
  const double age = Seconds(now - since).count();
  return std::chrono::duration_cast<Clock::duration>(Seconds(std::clamp(age * kShare, low, high)));
}

}  // namespace

// Shared with the thread, so that a thread that never comes back keeps what it uses.
struct Engine::Core {
  explicit Core(std::shared_ptr<Backend> used) : backend(std::move(used)) {}

  enum class Stage { Data, Generations, Single };

  struct Active {
    std::shared_ptr<Task> task;
    LoadRequest request;
    Stage stage;
    std::unique_ptr<Operation> operation;
    Clock::time_point submitted;
  };

  std::shared_ptr<Backend> backend;

  std::mutex mutex;
  std::condition_variable work;     // for the engine's thread
  std::condition_variable results;  // for whoever waits for it
  std::deque<std::function<void()>> commands;
  Backend::Notifications notifications;
  std::string drain_error;
  std::optional<Clock::time_point> expected_since;
  Clock::time_point attention_until{};
  bool woken = false;
  bool closing = false;
  bool ended = false;

  std::atomic<std::uint64_t> looks{0};
  // The engine's thread only.
  std::list<Active> active;
  std::optional<Clock::time_point> sending_since;

  void run();
  void start(std::shared_ptr<Task> task, LoadRequest request);
  bool advance(Active& entry);
  void check_generations(Active& entry);
  void finish(Task& task, OpState state, std::string error = {});
  void drain();
  std::optional<Clock::duration> next_look(Clock::time_point now);
  void fence(const std::string& peer);
  void post(std::function<void()> command);
};

void Engine::Core::post(std::function<void()> command) {
  const std::scoped_lock lock(mutex);
  commands.push_back(std::move(command));
  work.notify_one();
}

void Engine::Core::run() {
  while (true) {
    std::deque<std::function<void()>> due;
    {
      std::unique_lock lock(mutex);
      const auto something = [this] { return closing || !commands.empty(); };
      if (const auto look = next_look(Clock::now())) {
        work.wait_for(lock, *look, something);
      } else {
        work.wait(lock, [&] { return something() || next_look(Clock::now()).has_value(); });
      }
      due.swap(commands);
      if (closing && due.empty()) break;
    }
    for (auto& command : due) command();
    std::erase_if(active, [this](Active& entry) { return advance(entry); });
    drain();
  }
  active.clear();
  try {
    backend->close();
  } catch (const std::exception&) {
    // Nothing of it runs any more: its thread is this one.
  }
  const std::scoped_lock lock(mutex);
  ended = true;
  results.notify_all();
}

std::optional<Clock::duration> Engine::Core::next_look(Clock::time_point now) {
  std::optional<Clock::duration> least;
  const auto consider = [&least](Clock::duration candidate) { least = least ? std::min(*least, candidate) : candidate; };
  for (const Active& entry : active) {
    consider(interval(entry.submitted, now, kOperationMin, kOperationMax));
  }
  if (sending_since) consider(interval(*sending_since, now, kOperationMin, kExpectedMax));
  if (expected_since) consider(interval(*expected_since, now, kExpectedMin, kExpectedMax));
  if (now < attention_until) consider(std::chrono::duration_cast<Clock::duration>(Seconds(kAttention)));
  return least;
}

void Engine::Core::start(std::shared_ptr<Task> task, LoadRequest request) {
  Active entry{std::move(task), std::move(request), Stage::Data, nullptr, Clock::now()};
  try {
    if (!entry.request.begin.empty()) backend->notify(entry.request.peer, entry.request.begin);
    entry.operation = backend->submit(Direction::Read, entry.request.peer, entry.request.data);
  } catch (const std::exception& error) {
    finish(*entry.task, OpState::InDoubt, error.what());
    return;
  }
  if (!advance(entry)) active.push_back(std::move(entry));
}

// Whether the entry needs no more looking at. One in doubt stays until it is fenced.
bool Engine::Core::advance(Active& entry) {
  while (true) {
    const OpState state = entry.operation->poll();
    if (state == OpState::Submitted) return false;
    if (state == OpState::InDoubt) {
      if (entry.task->state == OpState::Submitted) finish(*entry.task, state, entry.operation->error());
      return false;
    }
    if (state == OpState::NotSubmitted || entry.stage == Stage::Single) {
      finish(*entry.task, state);
      return true;
    }
    if (entry.stage == Stage::Generations) {
      check_generations(entry);
      return true;
    }
    entry.stage = Stage::Generations;
    try {
      entry.operation = backend->submit(Direction::Read, entry.request.peer, entry.request.generations);
    } catch (const std::exception& error) {
      finish(*entry.task, OpState::InDoubt, error.what());
      return true;
    }
  }
}

void Engine::Core::check_generations(Active& entry) {
  const LoadRequest& request = entry.request;
  for (std::size_t index = 0; index < request.expected.size(); ++index) {
    entry.task->stale += request.words[index] != request.expected[index] ? 1 : 0;
  }
  try {
    backend->notify(request.peer, entry.task->stale != 0 ? request.failed : request.done);
    entry.task->source_told = true;
  } catch (const std::exception&) {
    entry.task->source_told = false;  // the caller tells it another way
  }
  finish(*entry.task, OpState::Done);
}

void Engine::Core::finish(Task& task, OpState state, std::string error) {
  if (task.state == OpState::Submitted) task.error = std::move(error);  // of one in doubt it may be read already
  task.state = state;
  const std::scoped_lock lock(mutex);
  woken = true;
  results.notify_all();
}

void Engine::Core::drain() {
  ++looks;
  Backend::Notifications arrived;
  std::string problem;
  try {
    arrived = backend->drain();
  } catch (const std::exception& error) {
    problem = error.what();
  }
  if (!backend->sending()) {
    sending_since.reset();
  } else if (!sending_since) {
    sending_since = Clock::now();
  }
  const std::scoped_lock lock(mutex);
  if (arrived.empty() && problem == drain_error) return;
  drain_error = std::move(problem);
  std::move(arrived.begin(), arrived.end(), std::back_inserter(notifications));
  woken = true;
  results.notify_all();
}

void Engine::Core::fence(const std::string& peer) {
  backend->fence(peer);
  std::erase_if(active, [this](Active& entry) { return advance(entry); });
}

Engine::Engine(std::shared_ptr<Backend> backend) : core_(std::make_shared<Core>(std::move(backend))) {
  thread_ = std::thread([core = core_] { core->run(); });
}

Engine::~Engine() { close(Seconds(5)); }

void Engine::call(std::function<void(Backend&)> command, Seconds timeout) {
  struct Answer {
    bool given = false;
    std::exception_ptr error;
  };
  const auto answer = std::make_shared<Answer>();
  const auto core = core_;
  {
    std::unique_lock lock(core->mutex);
    if (core->closing) throw BackendError("the transfer engine is closed");
  }
  core->post([core, answer, command = std::move(command)] {
    std::exception_ptr error;
    try {
      command(*core->backend);
    } catch (const std::exception&) {
      error = std::current_exception();
    }
    const std::scoped_lock lock(core->mutex);
    answer->given = true;
    answer->error = error;
    core->results.notify_all();
  });
  std::unique_lock lock(core->mutex);
  if (!core->results.wait_for(lock, timeout, [&] { return answer->given || core->ended; }) || !answer->given) {
    throw BackendError("the transfer thread is busy or gone: no answer in time");
  }
  if (answer->error) std::rethrow_exception(answer->error);
}

std::shared_ptr<Task> Engine::submit(Direction direction, std::string peer, std::vector<Copy> copies, Seconds timeout) {
  auto task = std::make_shared<Task>();
  const auto core = core_;
  call(
      [core, task, direction, peer = std::move(peer), copies = std::move(copies)](Backend& backend) {
        LoadRequest request;
        request.peer = peer;
        Core::Active entry{task, std::move(request), Core::Stage::Single, nullptr, Clock::now()};
        entry.operation = backend.submit(direction, peer, copies);
        if (!core->advance(entry)) core->active.push_back(std::move(entry));
      },
      timeout);
  return task;
}

std::shared_ptr<Task> Engine::load(LoadRequest request) {
  auto task = std::make_shared<Task>();
  const auto core = core_;
  core->post([core, task, request = std::move(request)]() mutable { core->start(task, std::move(request)); });
  return task;
}

void Engine::fence(std::string peer, Seconds timeout) {
  const auto core = core_;
  call([core, peer = std::move(peer)](Backend&) { core->fence(peer); }, timeout);
}

void Engine::expect(std::optional<Seconds> age, Seconds attention) {
  const auto now = Clock::now();
  const std::scoped_lock lock(core_->mutex);
  core_->expected_since.reset();
  if (age) core_->expected_since = now - std::chrono::duration_cast<Clock::duration>(*age);
  core_->attention_until = now + std::chrono::duration_cast<Clock::duration>(attention);
  core_->work.notify_one();
}

void Engine::wait(std::optional<Seconds> timeout) {
  std::unique_lock lock(core_->mutex);
  const auto something = [this] { return core_->woken || core_->ended; };
  if (timeout) {
    core_->results.wait_for(lock, *timeout, something);
  } else {
    core_->results.wait(lock, something);
  }
  core_->woken = false;
}

void Engine::wake() {
  const std::scoped_lock lock(core_->mutex);
  core_->woken = true;
  core_->results.notify_all();
}

std::uint64_t Engine::looks() const { return core_->looks; }

Backend::Notifications Engine::take_notifications() {
  const std::scoped_lock lock(core_->mutex);
  if (core_->notifications.empty() && !core_->drain_error.empty()) throw BackendError(core_->drain_error);
  return std::exchange(core_->notifications, {});
}

bool Engine::close(Seconds timeout) {
  std::unique_lock lock(core_->mutex);
  core_->closing = true;
  core_->work.notify_one();
  const bool ended = core_->results.wait_for(lock, timeout, [this] { return core_->ended; });
  lock.unlock();
  if (thread_.joinable()) {
    if (ended) {
      thread_.join();
    } else {
      thread_.detach();
    }
  }
  return ended;
}

}  // namespace kvferry
