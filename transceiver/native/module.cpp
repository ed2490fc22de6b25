// kvferry.transceiver.native.engine: the C++ engine and its backends for Python. Whatever may wait releases the GIL.
#include <pybind11/native_enum.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <utility>

#include "engine.h"
#include "faulty_backend.h"
#include "memory_backend.h"
#include "nixl_backend.h"
#include "ucx_backend.h"

namespace py = pybind11;

namespace kvferry {

namespace {

using U64Array = py::array_t<std::uint64_t, py::array::c_style>;
using Released = py::gil_scoped_release;

std::vector<Copy> copies_of(const U64Array& rows) {
  if (rows.ndim() != 2 || rows.shape(1) != 3) throw py::value_error("copies must be u64 [copies, 3]");
  const auto* first = reinterpret_cast<const Copy*>(rows.data());
  return {first, first + rows.shape(0)};
}
static_assert(sizeof(Copy) == 3 * sizeof(std::uint64_t));

std::vector<std::uint64_t> words_of(const U64Array& words) { return {words.data(), words.data() + words.size()}; }

std::optional<Seconds> seconds(const std::optional<double>& value) {
  return value ? std::optional<Seconds>(Seconds(*value)) : std::nullopt;
}

py::list notifications_of(const Backend::Notifications& arrived) {
  py::list list;
  for (const auto& [peer, message] : arrived) list.append(py::make_tuple(py::str(peer), py::bytes(message)));
  return list;
}

// Runs on the engine's thread, without the GIL here or there.
template <typename Command>
void call(Engine& engine, double timeout_s, Command command) {
  const Released released;
  engine.call(std::move(command), Seconds(timeout_s));
}

void bind_backends(py::module_& module) {
  py::class_<Backend, std::shared_ptr<Backend>>(module, "Backend");
  py::class_<NixlBackend, Backend, std::shared_ptr<NixlBackend>>(module, "NixlBackend")
      .def(py::init<const std::string&, std::string, std::vector<std::string>>(), py::arg("library_path"),
           py::arg("incarnation"), py::arg("plugins"), py::call_guard<Released>());
  py::class_<UcxBackend, Backend, std::shared_ptr<UcxBackend>>(module, "UcxBackend")
      .def(py::init<const std::string&, std::string>(), py::arg("library_path"), py::arg("incarnation"),
           py::call_guard<Released>());
  py::class_<MemoryBackend, Backend, std::shared_ptr<MemoryBackend>>(module, "MemoryBackend")
      .def(py::init<>())
      .def(
          "add_peer",
          [](const std::shared_ptr<MemoryBackend>& self, Engine& engine, const std::string& peer,
             const std::vector<MemoryBackend::Region>& regions, int line, double timeout_s) {
            call(engine, timeout_s, [self, peer, regions, line](Backend&) { self->add_peer(peer, regions, line); });
          },
          py::arg("engine"), py::arg("peer"), py::arg("regions"), py::arg("line"), py::arg("timeout_s"))
      .def(
          "add_mailbox",
          [](const std::shared_ptr<MemoryBackend>& self, Engine& engine, const std::string& peer, int mailbox,
             double timeout_s) {
            call(engine, timeout_s, [self, peer, mailbox](Backend&) { self->add_mailbox(peer, mailbox); });
          },
          py::arg("engine"), py::arg("peer"), py::arg("mailbox"), py::arg("timeout_s"));
  py::native_enum<Fault>(module, "Fault", "enum.Enum")
      .value("DELAY", Fault::Delay)
      .value("DROP", Fault::Drop)
      .value("CORRUPT", Fault::Corrupt)
      .value("BLACK_HOLE", Fault::BlackHole)
      .value("DUPLICATE", Fault::Duplicate)
      .value("BLOCK", Fault::Block)
      .finalize();
  py::native_enum<Target>(module, "Target", "enum.Enum")
      .value("OPERATION", Target::Operation)
      .value("NOTIFICATION", Target::Notification)
      .finalize();
  py::class_<FaultyBackend, Backend, std::shared_ptr<FaultyBackend>>(module, "FaultyBackend")
      .def(py::init<std::shared_ptr<Backend>>(), py::arg("inner"))
      .def("inject", &FaultyBackend::inject, py::arg("fault"), py::arg("target"), py::arg("skip"), py::arg("count"),
           py::arg("delay_s"))
      .def("fail_fences", &FaultyBackend::fail_fences, py::arg("count"))
      .def("unblock", &FaultyBackend::unblock);
}

void bind_task(py::module_& module) {
  py::native_enum<OpState>(module, "OpState", "enum.Enum")
      .value("NOT_SUBMITTED", OpState::NotSubmitted)
      .value("SUBMITTED", OpState::Submitted)
      .value("DONE", OpState::Done)
      .value("IN_DOUBT", OpState::InDoubt)
      .finalize();
  py::class_<Task, std::shared_ptr<Task>>(module, "Task")
      .def_property_readonly("state", [](const Task& task) { return task.state.load(); })
      .def_property_readonly("error", [](const Task& task) {
        return task.state == OpState::Submitted ? std::string() : task.error;
      })
      .def_property_readonly("stale", [](const Task& task) { return task.state == OpState::Done ? task.stale : 0; })
      .def_property_readonly("source_told",
                             [](const Task& task) { return task.state == OpState::Done && task.source_told; });
}

void bind_engine(py::module_& module) {
  py::class_<Engine>(module, "Engine")
      .def(py::init<std::shared_ptr<Backend>>(), py::arg("backend"))
      .def(
          "register_memory",
          [](Engine& self, std::uint64_t addr, std::uint64_t nbytes, double timeout_s) {
            call(self, timeout_s, [addr, nbytes](Backend& backend) { backend.register_memory(addr, nbytes); });
          },
          py::arg("addr"), py::arg("nbytes"), py::arg("timeout_s"))
      .def(
          "deregister_memory",
          [](Engine& self, std::uint64_t addr, std::uint64_t nbytes, double timeout_s) {
            call(self, timeout_s, [addr, nbytes](Backend& backend) { backend.deregister_memory(addr, nbytes); });
          },
          py::arg("addr"), py::arg("nbytes"), py::arg("timeout_s"))
      .def(
          "metadata",
          [](Engine& self, double timeout_s) {
            const auto found = std::make_shared<std::string>();
            call(self, timeout_s, [found](Backend& backend) { *found = backend.metadata(); });
            return py::bytes(*found);
          },
          py::arg("timeout_s"))
      .def(
          "load_peer",
          [](Engine& self, const std::string& peer, const py::bytes& metadata, double timeout_s) {
            call(self, timeout_s,
                 [peer, data = std::string(metadata)](Backend& backend) { backend.load_peer(peer, data); });
          },
          py::arg("peer"), py::arg("metadata"), py::arg("timeout_s"))
      .def(
          "forget_peer",
          [](Engine& self, const std::string& peer, double timeout_s) {
            call(self, timeout_s, [peer](Backend& backend) { backend.forget_peer(peer); });
          },
          py::arg("peer"), py::arg("timeout_s"))
      .def(
          "notify",
          [](Engine& self, const std::string& peer, const py::bytes& message, double timeout_s) {
            call(self, timeout_s, [peer, sent = std::string(message)](Backend& backend) { backend.notify(peer, sent); });
          },
          py::arg("peer"), py::arg("message"), py::arg("timeout_s"))
      .def(
          "submit",
          [](Engine& self, bool write, std::string peer, const U64Array& copies, double timeout_s) {
            auto rows = copies_of(copies);
            const Released released;
            return self.submit(write ? Direction::Write : Direction::Read, std::move(peer), std::move(rows),
                               Seconds(timeout_s));
          },
          py::arg("write"), py::arg("peer"), py::arg("copies"), py::arg("timeout_s"))
      .def(
          "load",
          [](Engine& self, std::string peer, const U64Array& data, const U64Array& generations, std::uint64_t words,
             const U64Array& expected, const py::bytes& begin, const py::bytes& done, const py::bytes& failed) {
            LoadRequest request{std::move(peer),
                                copies_of(data),
                                copies_of(generations),
                                reinterpret_cast<const std::uint64_t*>(words),
                                words_of(expected),
                                std::string(begin),
                                std::string(done),
                                std::string(failed)};
            const Released released;
            return self.load(std::move(request));
          },
          py::arg("peer"), py::arg("data"), py::arg("generations"), py::arg("words"), py::arg("expected"),
          py::arg("begin"), py::arg("done"), py::arg("failed"))
      .def(
          "fence", [](Engine& self, std::string peer, double timeout_s) { self.fence(std::move(peer), Seconds(timeout_s)); },
          py::arg("peer"), py::arg("timeout_s"), py::call_guard<Released>())
      .def(
          "expect",
          [](Engine& self, const std::optional<double>& age_s, double attention_s) {
            self.expect(seconds(age_s), Seconds(attention_s));
          },
          py::arg("age_s"), py::arg("attention_s"))
      .def(
          "wait", [](Engine& self, const std::optional<double>& timeout_s) { self.wait(seconds(timeout_s)); },
          py::arg("timeout_s"), py::call_guard<Released>())
      .def("wake", &Engine::wake)
      .def_property_readonly("looks", &Engine::looks)
      .def("take_notifications", [](Engine& self) { return notifications_of(self.take_notifications()); })
      .def(
          "close", [](Engine& self, double timeout_s) { return self.close(Seconds(timeout_s)); }, py::arg("timeout_s"),
          py::call_guard<Released>());
}

}  // namespace

}  // namespace kvferry

PYBIND11_MODULE(engine, module) {
  module.doc() = "Moves KV on threads of its own; see engine.pyi.";
  py::register_exception<kvferry::BackendError>(module, "BackendError");
  const py::object& library_error = py::register_exception<kvferry::LibraryError>(module, "LibraryError");
  py::register_exception<kvferry::PluginError>(module, "PluginError", library_error);
  kvferry::bind_backends(module);
  kvferry::bind_task(module);
  kvferry::bind_engine(module);
}
