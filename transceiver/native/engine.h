// The thread that owns a backend: it submits, polls, checks generations and exchanges notifications, while whoever
// asked waits without the interpreter lock or does something else.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "backend.h"

namespace kvferry {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

// What became of something submitted. Written by the engine's thread; the other fields are final once `state` is not
// Submitted, which from InDoubt still becomes NotSubmitted.
struct Task {
  std::atomic<OpState> state{OpState::Submitted};
  std::string error;
  std::uint64_t stale = 0;   // generation words that were not what they must be
  bool source_told = false;  // DONE or FAILED has been sent
};

// A whole load: BEGIN, the data, the generation words, DONE or FAILED.
struct LoadRequest {
  std::string peer;
  std::vector<Copy> data;
  std::vector<Copy> generations;        // into `words`
  const std::uint64_t* words = nullptr;  // registered memory, the caller's until the task has come to rest
  std::vector<std::uint64_t> expected;
  std::string begin;  // empty: it was sent before
  std::string done;
  std::string failed;
};

class Engine {
 public:
  explicit Engine(std::shared_ptr<Backend> backend);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Runs `command` on the engine's thread and returns when it has. BackendError when that takes longer: the thread is
  // inside a copy or a hanging library call, and `command` may still run later.
  void call(std::function<void(Backend&)> command, Seconds timeout);
  // As `call`; submits and returns what `Task` will tell. Errors of the submission itself are thrown.
  std::shared_ptr<Task> submit(Direction direction, std::string peer, std::vector<Copy> copies, Seconds timeout);
  // Returns at once; whatever goes wrong ends up in the task.
  std::shared_ptr<Task> load(LoadRequest request);
  void fence(std::string peer, Seconds timeout);

  // How eagerly to look for notifications. expected_since: a message is due since then. attention: until then, look
  // every half millisecond whatever happens. Neither: only while something is in flight or a notification is on its
  // way out, and an idle engine costs nothing.
  void expect(std::optional<Seconds> age, Seconds attention);

  // Sleeps until a task has ended, a notification has arrived, `wake` was called or the time is over.
  void wait(std::optional<Seconds> timeout);
  void wake();
  // How often it has looked for notifications: what an idle engine must not do.
  std::uint64_t looks() const;
  // Throws BackendError when receiving them fails.
  Backend::Notifications take_notifications();

  // Stops the thread and closes the backend. False when the thread does not come back in time: then operations may go on.
  bool close(Seconds timeout);

 private:
  struct Core;
  std::shared_ptr<Core> core_;
  std::thread thread_;
};

}  // namespace kvferry
