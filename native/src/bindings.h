// One function for each part of the module; `bindings.cpp` calls them all.
#pragma once

#include <nanobind/nanobind.h>

namespace kvist {

void bind_linear(nanobind::module_& module);
void bind_attention(nanobind::module_& module);
void bind_rowwise(nanobind::module_& module);
void bind_kv(nanobind::module_& module);
void bind_sampling(nanobind::module_& module);
void bind_model(nanobind::module_& module);
void bind_ceiling(nanobind::module_& module);

}  // namespace kvist
