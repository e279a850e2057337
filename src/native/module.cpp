// The Python module of the native core. Every index is checked in the bindings or just below, before memory is touched.
#include "bindings.hpp"

using namespace engram;

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // a buffer that lives until the interpreter ends is not a leak
  m.doc() = "The native core of engram: packed rows, lanes, and batches in and out.";

  bind_torch(m);
  bind_store(m);
  bind_queue(m);
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
  bind_store_testing(testing);
  bind_rows_testing(testing);
  bind_priorities_testing(testing);
}
