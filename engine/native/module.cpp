// Python's side. Tensors come as addresses: the module links no torch, and its callers in engine/ check the shapes.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "dispatch.h"

namespace py = pybind11;
using namespace kvferry::native;

namespace {

constexpr const char* kStorageNames[kStorages] = {"float32", "bfloat16", "int8"};

float* at(std::uintptr_t address) { return reinterpret_cast<float*>(address); }
std::int8_t* bytes_at(std::uintptr_t address) { return reinterpret_cast<std::int8_t*>(address); }

// By torch's names. Raises ValueError.
Storage storage_named(const std::string& name) {
  for (int i = 0; i < kStorages; ++i)
    if (name == kStorageNames[i]) return static_cast<Storage>(i);
  throw std::invalid_argument("the kernels cannot read K and V stored as " + name);
}

// One step of one layer group: where its tokens go and what they attend to. Serves every layer of the group.
class AttentionStep {
 public:
  // spans: row, start, length, lowest and number of blocks of each sequence; blocks: theirs, one after the other.
  AttentionStep(const PoolView& pool, std::vector<std::int64_t> blocks,
                const std::vector<std::array<std::int64_t, 5>>& spans)
      : pool_(pool), blocks_(std::move(blocks)) {
    std::size_t first = 0;
    for (const auto& [row, start, length, lowest, count] : spans) {
      if (count < 0 || first + count > blocks_.size() || count * pool.tokens_per_block < start + length)
        throw std::invalid_argument("a span needs more blocks than it has");
      spans_.push_back({row, start, length, lowest, blocks_.data() + first});
      first += count;
    }
  }

  AttentionStep(const AttentionStep&) = delete;  // the spans point into this object
  AttentionStep& operator=(const AttentionStep&) = delete;

  LayerPlace place(std::int64_t layer_offset) const {
    PoolView pool = pool_;
    pool.base += layer_offset;
    return {pool, spans_};
  }

  void attend(std::int64_t layer_offset, AttentionArgs args, int threads) const {
    const LayerPlace found = place(layer_offset);
    args.pool = found.pool;
    attention(args, found.spans, threads);
  }

 private:
  PoolView pool_;
  std::vector<std::int64_t> blocks_;
  std::vector<Span> spans_;
};

using Address = std::uintptr_t;
using Stride = std::ptrdiff_t;

// packed, bias, outputs, columns, is_int8
using LinearTuple = std::tuple<Address, Address, int, int, bool>;

PackedLinear packed_linear(const LinearTuple& linear) {
  const auto& [packed, bias, outputs, columns, is_int8] = linear;
  return {reinterpret_cast<const void*>(packed), at(bias), outputs, columns, is_int8};
}

// The layers of a model, which computes them all in one call.
class DecoderLayers {
 public:
  explicit DecoderLayers(int hidden) : hidden_(hidden) {}

  void add(Address attention_norm, float attention_eps, const LinearTuple& qkv, const LinearTuple& out, int heads,
           int kv_heads, int dim, float scale, Address mlp_norm, float mlp_eps, const LinearTuple& gate_up, const LinearTuple& down) {
    const DecoderLayer layer{
        at(attention_norm), attention_eps, packed_linear(qkv), packed_linear(out), heads,
        kv_heads,           dim,           scale,              at(mlp_norm),       mlp_eps,
        packed_linear(gate_up), packed_linear(down)};
    const bool fits = layer.qkv.columns == hidden_ && layer.qkv.outputs == (heads + 2 * kv_heads) * dim &&
                      layer.out.columns == heads * dim && layer.out.outputs == hidden_ &&
                      layer.gate_up.columns == hidden_ && layer.gate_up.outputs == 2 * layer.down.columns &&
                      layer.down.outputs == hidden_ && kv_heads > 0 && heads % kv_heads == 0;
    if (!fits) throw std::invalid_argument("the parts of a layer do not fit each other");
    layers_.push_back(layer);
  }

  // places: of each layer, its group's step and its offset there.
  void run(Address x, int rows, const std::vector<std::pair<const AttentionStep*, std::int64_t>>& places, Address turn,
           int threads) const {
    if (places.size() != layers_.size()) throw std::invalid_argument("every layer needs a place for its K and V");
    std::vector<LayerPlace> found;
    for (const auto& [step, offset] : places) found.push_back(step->place(offset));
    decoder_layers(layers_, found, at(x), hidden_, rows, at(turn), threads);
  }

 private:
  int hidden_;
  std::vector<DecoderLayer> layers_;
};

// Asks for huge pages; false where the system has none to give.
bool advise_huge(Address address, std::size_t nbytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  return madvise(reinterpret_cast<void*>(address), nbytes, MADV_HUGEPAGE) == 0;
#else
  static_cast<void>(address), static_cast<void>(nbytes);
  return false;
#endif
}

}  // namespace

PYBIND11_MODULE(kernels, m) {
  const py::call_guard<py::gil_scoped_release> unlocked;
  m.attr("PANEL") = kPanel;
  m.def("available", &available);
  m.def("use", &use, py::arg("name"));
  m.def("selected", [] { return kernels().name; });
  m.def("advise_huge", &advise_huge, py::arg("address"), py::arg("nbytes"));
  m.def("packed_floats", &packed_floats, py::arg("outputs"), py::arg("columns"));
  m.def(
      "pack",
      [](Address weight, std::int64_t outputs, std::int64_t columns, Address packed, int threads) {
        pack(at(weight), outputs, columns, at(packed), threads);
      },
      unlocked);
  m.def(
      "linear",
      [](Address x, Stride x_stride, int rows, int columns, Address packed, Address bias, Address y, Stride y_stride,
         int outputs, bool add, int threads) {
        linear({at(x), x_stride, nullptr, 0, at(packed), at(bias), at(y), y_stride, columns, outputs, add}, rows, threads);
      },
      unlocked);
  m.attr("GROUP") = kGroup;
  m.def("packed_int8_nbytes", &packed_int8_nbytes, py::arg("outputs"), py::arg("columns"));
  m.def(
      "pack_int8",
      [](Address values, Address scales, std::int64_t outputs, std::int64_t columns, Address packed, int threads) {
        pack_int8(bytes_at(values), reinterpret_cast<const std::uint16_t*>(scales), outputs, columns, bytes_at(packed),
                  threads);
      },
      unlocked);
  m.def(
      "linear_int8",
      [](Address x, Stride x_stride, int rows, int columns, Address packed, Address bias, Address y, Stride y_stride,
         int outputs, bool add, int threads) {
        linear_int8({at(x), x_stride, nullptr, bytes_at(packed), at(bias), at(y), y_stride, rows, columns, outputs, add},
                    threads);
      },
      unlocked);
  m.def(
      "rms_norm",
      [](Address x, Stride x_stride, Address weight, float eps, Address y, int rows, int columns, int threads) {
        rms_norm(at(x), x_stride, at(weight), eps, at(y), rows, columns, threads);
      },
      unlocked);
  m.def(
      "silu_mul",
      [](Address both, Address y, int rows, int columns, int threads) {
        silu_mul(at(both), at(y), rows, columns, threads);
      },
      unlocked);
  py::class_<AttentionStep>(m, "AttentionStep")
      .def(py::init([](Address pool, const std::string& storage, Stride slot, Stride plane, Stride head, Stride token, int tokens_per_block,
                       int window, std::vector<std::int64_t> blocks,
                       const std::vector<std::array<std::int64_t, 5>>& spans) {
        return std::make_unique<AttentionStep>(
            PoolView{reinterpret_cast<std::byte*>(pool), storage_named(storage), slot, plane, head, token, tokens_per_block, window}, std::move(blocks), spans);
      }))
      .def(
          "attend",
          [](const AttentionStep& step, std::int64_t layer_offset, Address q, Stride q_stride, Address k,
             Stride k_stride, Address v, Stride v_stride, Address turn, Address out, int heads, int kv_heads, int dim,
             float scale, int threads) {
            step.attend(layer_offset,
                        {at(q), q_stride, at(k), k_stride, at(v), v_stride, at(turn), at(out), {}, heads, kv_heads,
                         dim, scale},
                        threads);
          },
          unlocked);
  py::class_<DecoderLayers>(m, "DecoderLayers")
      .def(py::init<int>())
      .def("add", &DecoderLayers::add)
      .def("run", &DecoderLayers::run, unlocked);
}
