// Steps, frames and chunks as arrays, and what worker processes share: nothing here knows a store.
#include "bindings.hpp"
#include "frames.hpp"
#include "observation_chunk.hpp"
#include "owner_watch.hpp"
#include "policy_outputs.hpp"
#include "shared_atomics.hpp"
#include "step_columns.hpp"
#include "trajectories.hpp"

namespace engram {

void bind_trajectories(nb::module_& m) {
  using namespace nb::literals;
  m.def("number_trajectories", &number_trajectories, "done"_a, "current"_a.noconvert(), "starts"_a.noconvert(), "count"_a,
        "ids"_a.noconvert(), "first"_a = 0, "stop"_a.none() = nb::none());
  m.def("take_frames", &take_frames, "idle"_a, "taken"_a.noconvert(), "waiting"_a.noconvert(), "calls"_a.noconvert());
  m.def("take_frames", &take_frames_of_rows, "idle"_a.noconvert(), "taken"_a.noconvert(), "waiting"_a.noconvert(),
        "calls"_a.noconvert());
  m.def("add_episodes", &add_episodes<float>, "reward"_a.noconvert(), "done"_a, "totals"_a.noconvert(),
        "lengths"_a.noconvert(), "most"_a, "first"_a = 0, "stop"_a.none() = nb::none());
  m.def("add_episodes", &add_episodes<double>, "reward"_a.noconvert(), "done"_a, "totals"_a.noconvert(),
        "lengths"_a.noconvert(), "most"_a, "first"_a = 0, "stop"_a.none() = nb::none());
}

void bind_step_columns(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<StepRecorder>(m, "StepRecorder")
      .def(nb::init<CpuArray<int64_t, 1>, CpuArray<int64_t, 1>, CpuArray<bool, 1>>(), "waiting"_a.noconvert(),
           "taken"_a.noconvert(), "over"_a.noconvert())
      .def("use", &StepRecorder::use, "observations"_a, "actions"_a, "reward"_a, "terminated"_a, "truncated"_a, "done"_a,
           "idle"_a, "kept"_a.none())
      .def("keep", &StepRecorder::keep, "first"_a, "calls"_a)
      .def("add", &StepRecorder::add, "call"_a, "observations"_a, "reward"_a.none(), "terminated"_a.none(),
           "truncated"_a.none(), "idle"_a.none())
      .def("add_result", &StepRecorder::add_result, "call"_a, "result"_a.none())
      .def("waiting", &StepRecorder::waiting)
      .def("take", &StepRecorder::take, "calls"_a, "steps"_a, "asks_calls"_a, "last_calls"_a, "last_envs"_a, "last_rows"_a,
           nb::sig("def take(self, calls: int, steps: int, asks_calls: bool, last_calls: object, last_envs: object, "
                   "last_rows: list) -> tuple[list[torch.Tensor], numpy.typing.NDArray[numpy.int64] | None, int]"));
  m.def("ended_envs", &ended_envs, "n"_a, "terminated"_a.none(), "truncated"_a.none(), "idle"_a.none() = nb::none(),
        nb::sig("def ended_envs(n: int, terminated: object | None, truncated: object | None, idle: object | None = None) -> "
                "numpy.typing.NDArray[numpy.bool_] | None"));
  m.def("one_hot", &one_hot, "choices"_a, "start"_a, "n"_a);
}

void bind_policy_outputs(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<OutputRecorder>(m, "OutputRecorder")
      .def(nb::init<nb::list, nb::list>(), "keys"_a, "columns"_a)
      .def("put", &OutputRecorder::put, "step"_a, "outputs"_a);
  nb::class_<ActionReader>(m, "ActionReader")
      .def(nb::init<nb::handle, uint64_t, int64_t>(), "example"_a, "choices"_a, "start"_a)
      .def("read", &ActionReader::read, "action"_a.none());
  nb::class_<RowCopies>(m, "RowCopies").def(nb::init<nb::handle>(), "array"_a).def("row", &RowCopies::row, "number"_a);
}

void bind_frames(nb::module_& m) {
  using namespace nb::literals;
  m.def("stack_frames", &stack_frames, "frames"_a, "at"_a, "first"_a, "n"_a, "dim"_a, "newest"_a.none() = nb::none(),
        "rows"_a.none() = nb::none(), "pad"_a.none() = nb::none());
  m.def("slice_bounds", &slice_bounds, "ids"_a);
  m.def("take_rows", &take_rows, "tensors"_a, "rows"_a);
}

void bind_observation_chunk(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<ObservationEncoder>(m, "ObservationEncoder")
      .def(nb::init<uint64_t, uint64_t, uint64_t, uint64_t, const ChunkKeys&>(), "envs"_a, "steps"_a, "row_bytes"_a, "ahead"_a, "keys"_a)
      .def("append", [](ObservationEncoder& encoder, nb::ndarray<const uint8_t, nb::ndim<3>, nb::c_contig, nb::device::cpu> rows) {
        if (rows.shape(0) != encoder.envs() || rows.shape(2) != encoder.row_bytes()) throw nb::value_error("rows must be [envs, n, row bytes]");
        const nb::gil_scoped_release unlocked;
        encoder.append(rows.data(), rows.shape(1));
      }, "rows"_a)
      .def("sections", [](nb::handle_t<ObservationEncoder> self) { return chunk_sections(self); });
  nb::class_<DecodedChunk>(m, "ObservationDecoder")
      .def("__init__", [](DecodedChunk* self, ChunkBytes content, const std::vector<uint64_t>& given, uint64_t envs, uint64_t steps,
                          uint64_t row_bytes, uint64_t ahead, const ChunkKeys& keys) {
        new (self) DecodedChunk{content, ObservationDecoder(content.data(), content.size(), given, envs, steps, row_bytes, ahead, keys)};
      }, "content"_a, "given"_a, "envs"_a, "steps"_a, "row_bytes"_a, "ahead"_a, "keys"_a)
      .def("read", [](const DecodedChunk& self, uint64_t start, nb::ndarray<uint8_t, nb::ndim<3>, nb::c_contig, nb::device::cpu> out) {
        const ObservationDecoder& decoder = self.decoder;
        if (out.shape(0) != decoder.envs() || out.shape(2) != decoder.row_bytes()) throw nb::value_error("out must be [envs, n, row bytes]");
        if (start > decoder.steps() || out.shape(1) > decoder.steps() - start) throw nb::index_error("the chunk has no such rows");
        const nb::gil_scoped_release unlocked;
        decoder.read(start, start + out.shape(1), out.data());
      }, "start"_a, "out"_a);
}

void bind_atomics(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<AtomicInts>(m, "AtomicInts")
      .def(nb::init<AtomicInts::Array>(), "array"_a.noconvert())
      .def("__len__", &AtomicInts::size)
      .def("__getitem__", &AtomicInts::get, "index"_a)
      .def("__setitem__", &AtomicInts::set, "index"_a, "value"_a)
      .def("exchange", &AtomicInts::exchange, "index"_a, "value"_a, "other"_a)
      .def("shares_core", &AtomicInts::shares_core, "mine"_a, "first"_a, "stride"_a, "count"_a)
      .def("reaches", &AtomicInts::reaches, "index"_a, "value"_a, "seconds"_a);
}

void bind_owner_watch(nb::module_& m) {
  using namespace nb::literals;
  m.def("exit_when_readable", &exit_when_readable, "fd"_a);
}

}  // namespace engram
