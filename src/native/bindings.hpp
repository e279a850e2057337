// The parts of the Python module, by the unit that defines them. They run once: the compiler makes them small, not fast.
#pragma once
#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace engram {

// ---- tensors.cpp ----
[[gnu::cold]] void bind_torch(nb::module_& m);

// ---- bind_store.cpp ----
[[gnu::cold]] void bind_store(nb::module_& m);
[[gnu::cold]] void bind_fork_page(nb::module_& m);
[[gnu::cold]] void bind_store_testing(nb::module_& m);

// ---- bind_queue.cpp ----
[[gnu::cold]] void bind_queue(nb::module_& m);

// ---- bind_rows.cpp ----
[[gnu::cold]] void bind_codec(nb::module_& m);
[[gnu::cold]] void bind_epochs(nb::module_& m);
[[gnu::cold]] void bind_batches(nb::module_& m);
[[gnu::cold]] void bind_push(nb::module_& m);
[[gnu::cold]] void bind_n_step(nb::module_& m);
[[gnu::cold]] void bind_numpy_random(nb::module_& m);
[[gnu::cold]] void bind_items(nb::module_& m);
[[gnu::cold]] void bind_row_pool(nb::module_& m);
[[gnu::cold]] void bind_rows_testing(nb::module_& m);

// ---- bind_priorities.cpp ----
[[gnu::cold]] void bind_episodes(nb::module_& m);
[[gnu::cold]] void bind_priorities(nb::module_& m);
[[gnu::cold]] void bind_ranks(nb::module_& m);
[[gnu::cold]] void bind_priority_updates(nb::module_& m);
[[gnu::cold]] void bind_priorities_testing(nb::module_& m);

// ---- bind_steps.cpp ----
[[gnu::cold]] void bind_trajectories(nb::module_& m);
[[gnu::cold]] void bind_step_columns(nb::module_& m);
[[gnu::cold]] void bind_policy_outputs(nb::module_& m);
[[gnu::cold]] void bind_frames(nb::module_& m);
[[gnu::cold]] void bind_observation_chunk(nb::module_& m);
[[gnu::cold]] void bind_atomics(nb::module_& m);
[[gnu::cold]] void bind_owner_watch(nb::module_& m);

}  // namespace engram
