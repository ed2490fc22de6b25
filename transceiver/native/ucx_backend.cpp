#include "ucx_backend.h"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace kvferry {

namespace {

constexpr unsigned kNotification = 1;  // the id of our active messages
constexpr int kStepsPerLook = 4096;    // a peer that sends for ever must not hold the thread
// Rendezvous off. Nothing here uses it: notifications are eager, the rest is reads and writes. As long as it is on,
// UCX gives an endpoint that notices its peer's death no transport on which rendezvous could not be taken back, and so
// no copying from process to process for our reads either.
constexpr char kRendezvousThreshold[] = "RNDV_THRESH", kNever[] = "inf";
constexpr auto kClosePatience = std::chrono::milliseconds(200);

void* pointer(std::uint64_t addr) { return reinterpret_cast<void*>(addr); }

std::string text_of(ucp::Status status) { return "status " + std::to_string(status); }

// The entry whose range holds all of [addr, addr + nbytes).
template <typename Map>
const typename Map::mapped_type& holder(const Map& ranges, std::uint64_t addr, std::uint64_t nbytes, const char* whose) {
  auto after = ranges.upper_bound(addr);
  if (after != ranges.begin()) {
    const auto& [start, range] = *--after;
    const std::uint64_t offset = addr - start;
    if (nbytes <= range.nbytes && offset <= range.nbytes - nbytes) return range;
  }
  throw BackendError(std::to_string(nbytes) + " bytes that are not registered " + whose);
}

class UcxOperation : public Operation {
 public:
  explicit UcxOperation(std::shared_ptr<UcxBackend::Batch> batch) : batch_(std::move(batch)) {}

  OpState poll() override {
    if (ended()) return state_;
    if (batch_->owner == nullptr) return state_ = OpState::NotSubmitted;
    while (batch_->pending != 0 && batch_->failure == ucp::kOk && batch_->owner->progress()) {
    }
    if (batch_->failure != ucp::kOk) return OpState::InDoubt;  // until the fence: the others may still write
    if (batch_->pending == 0) state_ = OpState::Done;
    return state_;
  }

  std::string error() const override {
    if (batch_->failure == ucp::kOk) return {};
    return "UCX reports " + text_of(batch_->failure) + " (the peer is gone, or its memory)";
  }

 private:
  bool ended() const { return state_ != OpState::Submitted; }

  std::shared_ptr<UcxBackend::Batch> batch_;
  OpState state_ = OpState::Submitted;
};

}  // namespace

UcxBackend::UcxBackend(const std::string& library_path, std::string incarnation)
    : api_(ucp::library(library_path)), incarnation_(std::move(incarnation)) {
  create_context();
  create_worker();
}

UcxBackend::~UcxBackend() { close(); }

void UcxBackend::register_memory(std::uint64_t addr, std::uint64_t nbytes) {
  if (regions_.contains(addr)) throw BackendError("that memory is registered already");
  ucp::MapParams params{};
  params.field_mask = ucp::MapParams::kAddress | ucp::MapParams::kNbytes;
  params.address = pointer(addr);
  params.nbytes = nbytes;
  ucp::Handle memory = nullptr;
  check("register memory", api_.mem_map(context_, &params, &memory));
  regions_[addr] = {nbytes, memory};
}

void UcxBackend::deregister_memory(std::uint64_t addr, std::uint64_t nbytes) {
  const auto found = regions_.find(addr);
  if (found == regions_.end() || found->second.nbytes != nbytes) throw BackendError("that memory is not registered");
  const ucp::Handle memory = found->second.memory;
  regions_.erase(found);
  check("deregister memory", api_.mem_unmap(context_, memory));
}

std::string UcxBackend::metadata() {
  UcxMetadata described;
  described.incarnation = incarnation_;
  ucp::WorkerAttributes attributes{};
  attributes.field_mask = ucp::WorkerAttributes::kAddress;
  check("describe itself", api_.worker_query(worker(), &attributes));
  described.address.assign(reinterpret_cast<const char*>(attributes.address), attributes.address_nbytes);
  api_.worker_release_address(worker_, attributes.address);
  for (const auto& [addr, region] : regions_) {
    void* packed = nullptr;
    std::size_t nbytes = 0;
    check("describe its memory", api_.rkey_pack(context_, region.memory, &packed, &nbytes));
    described.regions.push_back({addr, region.nbytes, std::string(static_cast<const char*>(packed), nbytes)});
    api_.rkey_buffer_release(packed);
  }
  return encode(described);
}

void UcxBackend::load_peer(const std::string& peer, const std::string& metadata) {
  const UcxMetadata found = decode(metadata);
  if (found.incarnation != peer) {
    throw BackendError("the agent metadata of " + peer + " describes '" + found.incarnation + "'");
  }
  forget_peer(peer);
  connect(peer, found, metadata);
}

void UcxBackend::forget_peer(const std::string& peer) {
  const auto found = peers_.find(peer);
  if (found == peers_.end()) return;
  close_endpoint(std::move(found->second));
  peers_.erase(found);
}

std::unique_ptr<Operation> UcxBackend::submit(Direction direction, const std::string& peer,
                                              const std::vector<Copy>& copies) {
  const Peer& reached = reach(peer);
  for (const Copy& copy : copies) {  // all of them, before the first byte moves
    holder(regions_, copy.local, copy.nbytes, "here");
    holder(reached.regions, copy.remote, copy.nbytes, "there");
  }
  auto batch = std::make_shared<Batch>(this);
  batches_.insert(batch);
  post(direction, reached, copies, *batch);
  auto operation = std::make_unique<UcxOperation>(std::move(batch));
  operation->poll();  // which copies all of it when the peer's memory can be read without its help
  return operation;
}

void UcxBackend::post(Direction direction, const Peer& peer, const std::vector<Copy>& copies, Batch& batch) {
  ucp::RequestParams params{};
  params.op_attr_mask =
      ucp::RequestParams::kCallback | ucp::RequestParams::kUserData | ucp::RequestParams::kMemory;
  params.callback = &UcxBackend::copied;
  params.user_data = &batch;
  for (const Copy& copy : copies) {
    params.memory = holder(regions_, copy.local, copy.nbytes, "here").memory;
    const ucp::Handle key = holder(peer.regions, copy.remote, copy.nbytes, "there").key;
    took(batch, direction == Direction::Read
                    ? api_.get_nbx(peer.endpoint, pointer(copy.local), copy.nbytes, copy.remote, key, &params)
                    : api_.put_nbx(peer.endpoint, pointer(copy.local), copy.nbytes, copy.remote, key, &params));
    if (batch.failure != ucp::kOk) return;
  }
  if (direction == Direction::Write) {  // a write is done here before it is done there
    params.op_attr_mask = ucp::RequestParams::kCallback | ucp::RequestParams::kUserData;
    took(batch, api_.ep_flush_nbx(peer.endpoint, &params));
  }
}

void UcxBackend::took(Batch& batch, ucp::StatusPointer posted) {
  if (ucp::is_error(posted)) {
    batch.failure = ucp::error_of(posted);
  } else if (posted != nullptr) {
    ++batch.pending;
  }
}

void UcxBackend::notify(const std::string& peer, const std::string& message) {
  const Peer& reached = reach(peer);
  Sending& sending = sending_.emplace_back(api_, std::string());
  const auto length = static_cast<std::uint32_t>(incarnation_.size());
  sending.data.append(reinterpret_cast<const char*>(&length), sizeof length);
  sending.data += incarnation_;
  sending.data += message;
  ucp::RequestParams params{};
  params.op_attr_mask = ucp::RequestParams::kCallback | ucp::RequestParams::kUserData | ucp::RequestParams::kFlags;
  params.flags = ucp::RequestParams::kEager;
  params.callback = &UcxBackend::sent;
  params.user_data = &sending;
  const ucp::StatusPointer posted = api_.am_send_nbx(reached.endpoint, kNotification, nullptr, 0, sending.data.data(),
                                                     sending.data.size(), &params);
  sending.ended = posted == nullptr || ucp::is_error(posted);
  if (ucp::is_error(posted)) {
    throw BackendError("peer " + peer + " cannot be notified: UCX reports " + text_of(ucp::error_of(posted)));
  }
}

Backend::Notifications UcxBackend::drain() {
  if (worker_ != nullptr) progress();
  return std::exchange(arrived_, {});
}

bool UcxBackend::progress() {
  bool any = false;
  for (int step = 0; step < kStepsPerLook && api_.worker_progress(worker_) != 0; ++step) any = true;
  reap();
  return any;
}

void UcxBackend::reap() {
  std::erase_if(sending_, [](const Sending& sending) { return sending.ended; });
  std::erase_if(batches_, [](const std::shared_ptr<Batch>& batch) { return batch->pending == 0; });
  std::erase_if(closing_, [this](const Closing& closing) {
    if (closing.request != nullptr && api_.request_check_status(closing.request) == ucp::kInProgress) return false;
    if (closing.request != nullptr) api_.request_free(closing.request);
    for (const auto& [addr, region] : closing.peer->regions) api_.rkey_destroy(region.key);
    return true;
  });
}

void UcxBackend::fence(const std::string& peer) {
  const auto found = peers_.find(peer);
  if (found != peers_.end()) {
    close_endpoint(std::move(found->second));
    peers_.erase(found);
  }
  std::map<std::string, std::string> others;
  for (const auto& [other, known] : peers_) others[other] = known->metadata;
  destroy_worker();
  create_worker();
  for (const auto& [other, metadata] : others) {
    try {
      connect(other, decode(metadata), metadata);
    } catch (const BackendError&) {
      continue;  // its next operation says so
    }
  }
}

void UcxBackend::close() {
  destroy_worker();
  for (const auto& [addr, region] : regions_) api_.mem_unmap(context_, region.memory);
  regions_.clear();
  if (context_ != nullptr) api_.cleanup(std::exchange(context_, nullptr));
}

void UcxBackend::create_context() {
  ucp::Handle config = nullptr;
  check("read its settings", api_.config_read(nullptr, nullptr, &config));
  const std::unique_ptr<ucp::Opaque, void (*)(ucp::Handle)> own_config(config, api_.config_release);
  if (std::getenv("UCX_RNDV_THRESH") == nullptr) {  // what the operator sets stays
    check("be set up", api_.config_modify(config, kRendezvousThreshold, kNever));
  }
  ucp::Params params{};
  params.field_mask = ucp::Params::kFeatures;
  params.features = ucp::Params::kRemoteMemory | ucp::Params::kActiveMessages;
  check("start", api_.init_version(ucp::kMajor, ucp::kOldestMinor, &params, config, &context_));
}

void UcxBackend::create_worker() {
  ucp::WorkerParams params{};
  params.field_mask = ucp::WorkerParams::kThreadMode;
  params.thread_mode = ucp::WorkerParams::kSerialized;  // made by one thread, used by another
  check("start a worker", api_.worker_create(context_, &params, &worker_));
  ucp::MessageHandlerParams handler{};
  handler.field_mask = ucp::MessageHandlerParams::kId | ucp::MessageHandlerParams::kFlags |
                       ucp::MessageHandlerParams::kCallback | ucp::MessageHandlerParams::kArgument;
  handler.id = kNotification;
  handler.flags = ucp::MessageHandlerParams::kWholeMessage;
  handler.callback = &UcxBackend::arrived;
  handler.argument = this;
  check("listen for notifications", api_.worker_set_am_recv_handler(worker_, &handler));
}

void UcxBackend::destroy_worker() {
  if (worker_ == nullptr) return;
  for (auto& [name, peer] : peers_) close_endpoint(std::move(peer));
  peers_.clear();
  const auto deadline = std::chrono::steady_clock::now() + kClosePatience;
  while (!closing_.empty() && std::chrono::steady_clock::now() < deadline) progress();
  for (const Closing& closing : closing_) {
    for (const auto& [addr, region] : closing.peer->regions) api_.rkey_destroy(region.key);
  }
  api_.worker_destroy(std::exchange(worker_, nullptr));
  for (const auto& batch : batches_) batch->owner = nullptr;
  batches_.clear();
  closing_.clear();
  sending_.clear();
}

void UcxBackend::connect(const std::string& peer, const UcxMetadata& found, const std::string& metadata) {
  auto added = std::make_unique<Peer>();
  added->metadata = metadata;
  ucp::EndpointParams params{};
  params.field_mask =
      ucp::EndpointParams::kAddress | ucp::EndpointParams::kErrorMode | ucp::EndpointParams::kErrorHandler;
  params.address = found.address.data();
  params.error_mode = ucp::EndpointParams::kPeer;
  params.error_handler = {&UcxBackend::failed, added.get()};
  check("reach a peer", api_.ep_create(worker(), &params, &added->endpoint));
  for (const UcxRegion& region : found.regions) {
    ucp::Handle key = nullptr;
    const ucp::Status status = api_.ep_rkey_unpack(added->endpoint, region.key.data(), &key);
    if (status != ucp::kOk) {
      close_endpoint(std::move(added));
      check("reach a peer's memory", status);
    }
    added->regions[region.addr] = {region.nbytes, key};
  }
  peers_[peer] = std::move(added);
}

// Whatever is under way with it ends with an error, once progress has been made.
void UcxBackend::close_endpoint(std::unique_ptr<Peer> peer) {
  ucp::RequestParams params{};
  params.op_attr_mask = ucp::RequestParams::kFlags;
  params.flags = ucp::RequestParams::kForceClose;
  const ucp::StatusPointer request = api_.ep_close_nbx(peer->endpoint, &params);
  closing_.push_back({std::move(peer), ucp::is_error(request) ? nullptr : request});
}

void UcxBackend::check(const char* what, ucp::Status status) const {
  if (status != ucp::kOk) throw BackendError(std::string("UCX could not ") + what + ": " + text_of(status));
}

ucp::Handle UcxBackend::worker() const {
  if (worker_ == nullptr) throw BackendError("the UCX worker is not running");
  return worker_;
}

UcxBackend::Peer& UcxBackend::reach(const std::string& peer) {
  worker();
  const auto found = peers_.find(peer);
  if (found == peers_.end()) throw BackendError("peer " + peer + " is not known to the UCX agent");
  if (found->second->failure != ucp::kOk) {
    throw BackendError("peer " + peer + " is gone: UCX reports " + text_of(found->second->failure));
  }
  return *found->second;
}

void UcxBackend::copied(void* request, ucp::Status status, void* batch) {
  auto& ended = *static_cast<Batch*>(batch);
  if (status != ucp::kOk) ended.failure = status;
  --ended.pending;
  ended.owner->api_.request_free(request);
}

void UcxBackend::sent(void* request, ucp::Status, void* sending) {
  auto& ended = *static_cast<Sending*>(sending);
  ended.ended = true;  // whether it arrived is for the session to find out
  ended.api.request_free(request);
}

void UcxBackend::failed(void* peer, ucp::Handle, ucp::Status status) { static_cast<Peer*>(peer)->failure = status; }

ucp::Status UcxBackend::arrived(void* self, const void*, std::size_t, void* data, std::size_t nbytes,
                                const std::uint64_t* attributes) {
  const auto* first = static_cast<const char*>(data);
  std::uint32_t length = 0;
  if ((*attributes & ucp::MessageHandlerParams::kRendezvous) != 0 || nbytes < sizeof length) return ucp::kOk;
  std::memcpy(&length, first, sizeof length);
  if (length > nbytes - sizeof length) return ucp::kOk;
  const std::string sender(first + sizeof length, length);
  const std::size_t start = sizeof length + length;
  static_cast<UcxBackend*>(self)->arrived_.emplace_back(sender, std::string(first + start, nbytes - start));
  return ucp::kOk;
}

}  // namespace kvferry
