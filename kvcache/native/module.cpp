// The Python module kvferry.kvcache.native.core; core.pyi documents it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cache.h"
#include "checks.h"
#include "ledger.h"

namespace py = pybind11;
using namespace kvferry;

namespace {

Bytes bytes_of(const py::bytes& bytes) {
  const std::string_view view = bytes;
  return {reinterpret_cast<const std::uint8_t*>(view.data()), view.size()};
}

Digest digest_of(const py::bytes& bytes) {
  const Bytes view = bytes_of(bytes);
  Digest digest;
  if (view.size() != digest.size()) throw py::value_error("a digest has 32 bytes");
  std::copy(view.begin(), view.end(), digest.begin());
  return digest;
}

py::bytes to_bytes(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

// Calls `use` with the tokens of a contiguous buffer of u32, which it may not keep.
template <typename Use>
auto with_tokens(const py::buffer& buffer, Use use) {
  const py::buffer_info info = buffer.request();
  const bool packed = info.ndim == 1 && (info.shape[0] == 0 || info.strides[0] == info.itemsize);
  if (!info.item_type_is_equivalent_to<std::uint32_t>() || !packed) {
    throw py::type_error("token ids come as a contiguous buffer of unsigned 32-bit integers");
  }
  return use(Tokens(static_cast<const std::uint32_t*>(info.ptr), static_cast<std::size_t>(info.shape[0])));
}

// The slots of one layer group of a cache, as a sequence that changes with the cache.
struct Table {
  std::shared_ptr<Cache> cache;
  std::size_t group;

  const std::vector<Slot>& slots() const { return cache->table(group); }

  Slot at(py::ssize_t index) const {
    const auto size = static_cast<py::ssize_t>(slots().size());
    if (index < -size || index >= size) throw py::index_error("block table index out of range");
    return slots()[index < 0 ? index + size : index];
  }

  py::list slice(const py::slice& slice) const {
    py::ssize_t start = 0, stop = 0, step = 0, length = 0;
    if (!slice.compute(static_cast<py::ssize_t>(slots().size()), &start, &stop, &step, &length)) {
      throw py::error_already_set();
    }
    py::list cut(static_cast<std::size_t>(length));
    for (py::ssize_t index = 0; index < length; ++index) cut[index] = slots()[start + index * step];
    return cut;
  }
};

using Spec = std::tuple<std::string, std::int64_t, Slot>;

GroupSpec spec_of(const Spec& spec) {
  const auto& [keeps, window, num_slots] = spec;
  if (num_slots < 0) throw py::value_error("a pool has no negative size");
  if (keeps == "all") return {LayerGroup::Keeps::kAll, 0, num_slots};
  if (keeps == "state") return {LayerGroup::Keeps::kState, 0, num_slots};
  if (window < 1) throw py::value_error("a window has at least one token");
  if (keeps == "window") return {LayerGroup::Keeps::kWindow, window, num_slots};
  if (keeps == "chunk") return {LayerGroup::Keeps::kChunk, window, num_slots};
  throw py::value_error("a layer group keeps all, a window, a chunk or a state, not " + keeps);
}

py::object shortage_of(const std::optional<Shortage>& shortage) {
  if (!shortage) return py::none();
  return py::make_tuple(shortage->group, shortage->needed, shortage->available);
}

py::list copies_of(const std::vector<SlotCopy>& copies) {
  py::list list;
  for (const auto& [group, from, to] : copies) list.append(py::make_tuple(group, from, to));
  return list;
}

py::tuple journal_of(const Journal& journal) {
  py::list links, evictions;
  for (const auto& [digest, parent] : journal.links) {
    links.append(py::make_tuple(to_bytes(digest), parent ? py::object(to_bytes(*parent)) : py::none()));
  }
  for (const auto& [digest, group, slot] : journal.evictions) {
    evictions.append(py::make_tuple(to_bytes(digest), group, slot));
  }
  return py::make_tuple(links, evictions);
}

void bind_hashing(py::module_& module) {
  module.def("sha256", [](const py::bytes& data) { return to_bytes(sha256(bytes_of(data), {})); });
  module.def("sha256_portable",
             [](const py::bytes& data) { return to_bytes(sha256(bytes_of(data), {}, compress_portable)); });
  module.def("sha_instructions_available", sha_instructions_available);
}

void bind_ledger(py::module_& module) {
  py::class_<Ledger>(module, "Ledger")
      .def(py::init([](const std::vector<Spec>& specs, std::int64_t tokens_per_block, bool reuse, bool journal,
                       const std::vector<Slot>& per_slab) {
             if (tokens_per_block < 1) throw py::value_error("a block has at least one token");
             std::vector<GroupSpec> groups;
             for (const Spec& spec : specs) groups.push_back(spec_of(spec));
             for (std::size_t group = 0; group < per_slab.size(); ++group) groups.at(group).per_slab = per_slab[group];
             return std::make_unique<Ledger>(groups, tokens_per_block, reuse, journal);
           }),
           py::arg("groups"), py::arg("tokens_per_block"), py::arg("reuse"), py::arg("journal") = false,
           py::arg("per_slab") = std::vector<Slot>{})
      .def(
          "open",
          [](Ledger& ledger, const py::bytes& scope, const py::buffer& tokens, Priority priority, std::int64_t loaded) {
            return with_tokens(tokens,
                               [&](Tokens view) { return ledger.open(digest_of(scope), view, priority, loaded); });
          },
          py::keep_alive<0, 1>())
      .def("match",
           [](Ledger& ledger, const py::bytes& scope, const py::buffer& tokens) {
             return with_tokens(tokens, [&](Tokens view) { return ledger.match(digest_of(scope), view); });
           })
      .def("available", &Ledger::available)
      .def("counts",
           [](const Ledger& ledger, std::optional<std::size_t> group) {
             const Counts counts = group ? ledger.counts(*group) : ledger.counts();
             return py::make_tuple(counts.total, counts.free, counts.cached, counts.pinned, counts.quarantined);
           },
           py::arg("group") = py::none())
      .def("idle", &Ledger::idle)
      .def("coldest",
           [](const Ledger& ledger, std::size_t group, Slot most) {
             py::list list;
             for (const auto& [digest, slot] : ledger.coldest(group, most)) {
               list.append(py::make_tuple(to_bytes(digest), slot));
             }
             return list;
           })
      .def("idle_slabs", &Ledger::idle_slabs)
      .def("first_idle_slabs", &Ledger::first_idle_slabs)
      .def("withhold", &Ledger::withhold)
      .def("give_back", &Ledger::give_back)
      .def_property_readonly("evicted", &Ledger::evicted)
      .def("clear", &Ledger::clear)
      .def("drain", [](Ledger& ledger) { return journal_of(ledger.drain()); })
      .def("check_integrity", &Ledger::check_integrity);
}

void bind_cache(py::module_& module) {
  py::class_<Cache, std::shared_ptr<Cache>>(module, "Cache")
      .def_property_readonly("published", &Cache::published)
      .def_property_readonly("late", &Cache::late)
      .def("first_block", &Cache::first_block)
      .def(
          "table",
          [](const std::shared_ptr<Cache>& cache, std::size_t group) {
            static_cast<void>(cache->table(group));  // raises where there is no such group
            return Table{cache, group};
          },
          py::keep_alive<0, 1>())
      .def("needs", &Cache::needs)
      .def("shortage", [](const Cache& cache, std::int64_t blocks, std::int64_t near,
                          std::int64_t loaded) { return shortage_of(cache.shortage(blocks, near, loaded)); })
      .def("grow", &Cache::grow)
      .def("advance", &Cache::advance)
      .def("publish",
           [](Cache& cache, const py::buffer& tokens, std::int64_t blocks, std::int64_t history) {
             with_tokens(tokens, [&](Tokens view) { cache.publish(view, blocks, history); });
           })
      .def("snapshot", [](Cache& cache) { return copies_of(cache.snapshot()); })
      .def("begin_block",
           [](Cache& cache, const py::buffer& tokens, std::size_t least) {
             return with_tokens(tokens, [&](Tokens view) {
               const auto [shared, copies] = cache.begin_block(view, least);
               return py::make_tuple(shared, copies_of(copies));
             });
           })
      .def("pin", &Cache::pin, py::keep_alive<0, 1>())
      .def("quarantine", &Cache::quarantine, py::keep_alive<0, 1>())
      .def("close", &Cache::close)
      .def("check_integrity", &Cache::check_integrity);
  py::class_<Hold, std::shared_ptr<Hold>>(module, "Hold")
      .def_property_readonly("slots", &Hold::slots)
      .def_property_readonly("first_blocks", &Hold::first_blocks)
      .def("release", &Hold::release);
  py::class_<Table>(module, "Table")
      .def("__len__", [](const Table& table) { return table.slots().size(); })
      .def("__getitem__", &Table::at)
      .def("__getitem__", &Table::slice)
      .def(
          "__iter__",
          [](const Table& table) { return py::make_iterator(table.slots().begin(), table.slots().end()); },
          py::keep_alive<0, 1>());
}

}  // namespace

PYBIND11_MODULE(core, module) {
  py::register_exception_translator([](std::exception_ptr raised) {
    try {
      if (raised) std::rethrow_exception(raised);
    } catch (const BrokenInvariant& broken) {
      py::set_error(PyExc_AssertionError, broken.what());
    }
  });
  bind_hashing(module);
  bind_ledger(module);
  bind_cache(module);
  // isinstance(table, collections.abc.Sequence) holds, as for a list.
  py::module_::import("collections.abc").attr("Sequence").attr("register")(module.attr("Table"));
}
