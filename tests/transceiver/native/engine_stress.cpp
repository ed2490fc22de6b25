// Many threads load through one engine whose backend misbehaves at random, fence it and start again. Built with
// sanitizers by `make sanitize`; exits 1 when a load that was called good has wrong bytes, or one in doubt does not say why.
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "engine.h"
#include "faulty_backend.h"
#include "memory_backend.h"

namespace {

using namespace kvferry;

constexpr std::size_t kBlock = 512, kBlocks = 64, kThreads = 4, kLoads = 300;
const Seconds kPatience(10);

std::uint64_t address(const void* pointer) { return reinterpret_cast<std::uint64_t>(pointer); }

struct Source {
  std::vector<unsigned char> pool = std::vector<unsigned char>(kBlock * kBlocks);
  std::vector<std::uint64_t> words = std::vector<std::uint64_t>(kBlocks);
  int mail[2] = {-1, -1};

  Source() {
    for (std::size_t index = 0; index < pool.size(); ++index) pool[index] = static_cast<unsigned char>(index * 31 >> 3);
    for (std::size_t index = 0; index < kBlocks; ++index) words[index] = 1000 + index;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, mail) != 0) std::abort();
  }
  ~Source() {
    close(mail[0]);
    close(mail[1]);
  }

  void join(Engine& engine, const std::shared_ptr<MemoryBackend>& memory) const {
    engine.call(
        [&, line = dup(mail[1])](Backend&) {
          memory->add_peer("far", {{address(pool.data()), pool.size(), address(pool.data())},
                                   {address(words.data()), 8 * words.size(), address(words.data())}},
                           line);
        },
        kPatience);
  }

  void read_mail() const {
    char packet[64];
    while (recv(mail[0], packet, sizeof packet, MSG_DONTWAIT) > 0) {
    }
  }
};

struct Tally {
  std::atomic<int> good{0}, stale{0}, failed{0}, wrong{0};
};

// One reader: its own blocks and scratch words, the engine shared with the others.
void read(Engine& engine, const std::shared_ptr<MemoryBackend>& memory, const Source& source, unsigned seed, Tally& tally) {
  std::mt19937 random(seed);
  std::vector<unsigned char> pool(kBlock * 4);
  std::vector<std::uint64_t> scratch(4);
  engine.call(
      [&](Backend& backend) {
        backend.register_memory(address(pool.data()), pool.size());
        backend.register_memory(address(scratch.data()), 8 * scratch.size());
      },
      kPatience);
  for (std::size_t number = 0; number < kLoads; ++number) {
    LoadRequest request;
    request.peer = "far";
    request.begin = "begin";
    request.done = "done";
    request.failed = "failed";
    request.words = scratch.data();
    std::vector<std::size_t> blocks;
    for (std::size_t to = 0; to < 4; ++to) {
      blocks.push_back(random() % kBlocks);
      request.data.push_back({address(&pool[to * kBlock]), address(&source.pool[blocks[to] * kBlock]), kBlock});
      request.generations.push_back({address(&scratch[to]), address(&source.words[blocks[to]]), 8});
      request.expected.push_back(1000 + blocks[to] + (random() % 50 == 0 ? 1 : 0));
    }
    const auto task = engine.load(std::move(request));
    while (task->state == OpState::Submitted) engine.wait(Seconds(0.001));
    if (task->state == OpState::Done && task->stale == 0) {
      bool right = true;
      for (std::size_t to = 0; to < 4; ++to) {
        right = right && std::equal(&pool[to * kBlock], &pool[(to + 1) * kBlock], &source.pool[blocks[to] * kBlock]);
      }
      ++(right ? tally.good : tally.wrong);
    } else if (task->state == OpState::Done) {
      ++tally.stale;
    } else {
      ++(task->error.empty() && task->state == OpState::InDoubt ? tally.wrong : tally.failed);
      try {
        engine.fence("far", kPatience);
      } catch (const BackendError&) {  // on command; the next failure tries again
      }
      source.join(engine, memory);
    }
    source.read_mail();
  }
  engine.call(
      [&](Backend& backend) {
        backend.deregister_memory(address(pool.data()), pool.size());
        backend.deregister_memory(address(scratch.data()), 8 * scratch.size());
      },
      kPatience);
}

void disturb(Engine& engine, FaultyBackend& faults, const std::atomic<bool>& stop) {
  constexpr Fault kFaults[] = {Fault::Delay, Fault::Drop, Fault::Duplicate};
  std::mt19937 random(7);
  while (!stop) {
    const auto target = random() % 4 == 0 ? Target::Notification : Target::Operation;
    faults.inject(kFaults[random() % 3], target, static_cast<int>(random() % 20), 1, 0.0005);
    if (random() % 20 == 0) faults.fail_fences(1);
    engine.expect(random() % 2 ? std::optional<Seconds>(Seconds(0)) : std::nullopt, Seconds(0.001));
    try {
      engine.take_notifications();
    } catch (const BackendError&) {  // one that was delayed past the fence of its peer cannot be sent any more
    }
    engine.wake();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace

int main() {
  const Source source;
  const auto memory = std::make_shared<MemoryBackend>();
  const auto faults = std::make_shared<FaultyBackend>(memory);
  Tally tally;
  {
    Engine engine(faults);
    source.join(engine, memory);
    std::atomic<bool> stop{false};
    std::thread disturber([&] { disturb(engine, *faults, stop); });
    std::vector<std::thread> readers;
    for (unsigned seed = 0; seed < kThreads; ++seed) {
      readers.emplace_back([&, seed] { read(engine, memory, source, seed, tally); });
    }
    for (auto& reader : readers) reader.join();
    stop = true;
    disturber.join();
    if (!engine.close(kPatience)) return 1;
  }
  std::printf("%d good, %d stale, %d failed, %d wrong\n", tally.good.load(), tally.stale.load(), tally.failed.load(),
              tally.wrong.load());
  return tally.wrong == 0 && tally.good > 0 && tally.stale > 0 && tally.failed > 0 ? 0 : 1;
}
