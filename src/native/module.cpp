// The Python module of the native core. Every index is checked in the bindings or just below, before memory is touched.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>

#include "bind_batches.hpp"
#include "bind_episodes.hpp"
#include "bind_priorities.hpp"
#include "bind_ranks.hpp"
#include "bind_store.hpp"
#include "bind_testing.hpp"
#include "fork_page.hpp"
#include "frames.hpp"
#include "items.hpp"
#include "n_step.hpp"
#include "numpy_random.hpp"
#include "observation_chunk.hpp"
#include "owner_watch.hpp"
#include "policy_outputs.hpp"
#include "priority_updates.hpp"
#include "push.hpp"
#include "row_pool.hpp"
#include "shared_atomics.hpp"
#include "step_columns.hpp"
#include "trajectories.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace engram;

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // a buffer that lives until the interpreter ends is not a leak
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const FileCutShort& error) {
      PyErr_SetString(nb::module_::import_("engram.errors").attr("StorageError").ptr(), error.what());
    } catch (const NoRoomForUnits& error) {
      PyErr_SetString(nb::module_::import_("engram.errors").attr("StorageError").ptr(), error.what());
    } catch (const LanesBusy& error) {
      PyErr_SetString(nb::module_::import_("engram.errors").attr("StorageInUseError").ptr(), error.what());
    } catch (const SyncFailed& error) {
      PyErr_SetString(nb::module_::import_("engram.errors").attr("StorageError").ptr(), error.what());
    }
  });
  m.doc() = "The native core of engram: packed rows, lanes, and batches in and out.";
  m.def("use_torch", &use_torch, "tensor_type"_a, "exchange_api"_a.none(), "lazy_bits"_a, "describe"_a, "make"_a);
  m.def("use_dispatch_keys", [](nb::list tensors, uint64_t lazy) { return DispatchKeys::instance().learn(tensors, lazy); },
        "tensors"_a, "lazy"_a);

  bind_store(m);
  bind_batches(m);
  bind_push(m);
  bind_n_step(m);
  bind_numpy_random(m);
  bind_items(m);
  bind_episodes(m);
  bind_priorities(m);
  bind_ranks(m);
  bind_priority_updates(m);
  bind_row_pool(m);
  bind_trajectories(m);
  bind_step_columns(m);
  bind_policy_outputs(m);
  bind_frames(m);
  bind_observation_chunk(m);
  bind_atomics(m);
  bind_owner_watch(m);
  bind_fork_page(m);
  nb::module_ testing = m.def_submodule("testing", "What only tests call.");
  bind_testing(testing);
}
