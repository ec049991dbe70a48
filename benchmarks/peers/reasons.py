"""`REASONS` explains why tests of the peers fail with `ft.jit`, because functree differs on purpose.

It maps each peer to reasons, and each reason to the names of tests, as patterns of `fnmatch`.
"""

REASONS: dict[str, dict[str, str]] = {
    "jax": {
        "functree raises the expected error, but with its own class and message": """
            JitTest.test_cpp_jit_raises_on_non_hashable_static_argnum
            JitTest.test_jit_raises_on_first_invocation_on_non_hashable_static_argnum
            JitTest.test_donate_argnames_signature_fail JitTest.test_double_donation
            JitTest.test_intersecting_static_and_donate_argnames JitTest.test_jit_argnames_validation*
            JitTest.test_jit_argnums_overflow_error* JitTest.test_jit_of_noncallable
            JitTest.test_static_argnum_on_static_method_is_not_supported JitTest.test_staticmethod_is_not_supported
            JitTest.test_jit_lower_compile_arg_type_mismatch JitTest.test_jit_lower_compile_*in_tree_mismatch
            JitTest.test_jit_lower_compile_vmap JitTest.test_jit_of_generator
            APITest.test_scalar_conversion_errors APITest.test_dunder_jax_array_warnings
            ArrayPjitTest.test_aot_compile_in_tree_mismatch ArrayPjitTest.test_check_arg_error
            ArrayPjitTest.test_abstract_mesh_lower ArrayPjitTest.test_in_axis_resources_mismatch_error
            ArrayPjitTest.test_in_out_shardings_unconstrained_error ArrayPjitTest.test_jit_out_shardings_unconstrained
            ArrayPjitTest.test_jit_with_sharding_constraint_committed_inp_error ArrayPjitTest.test_mixed_inputs
            ArrayPjitTest.test_pjit_committed_array_different_devices*
            ArrayPjitTest.test_pjit_pytree_inp_device_assignment_mismatch
            ArrayPjitTest.test_array_device_assignment_mismatch_*
            ArrayPjitTest.test_pjit_uncommitted_array_and_committed_array
            ArrayPjitTest.test_array_enabled_non_empty_mesh_with_pspec
            ArrayPjitTest.test_pjit_kwargs_axis_resources_error
            PJitTest.testLowerCompileArgTypeMismatch PJitTest.testLowerCompileInTreeMismatch
            PJitErrorTest.testAxisResourcesMismatch PJitErrorTest.testNestedDifferentResources
            PJitErrorTest.testNonDivisible* PJitErrorTest.testOutShardingsMismatchShowsAllDetails
            PJitErrorTest.testRankTooLow* PJitErrorTest.testRepeated*Resources PJitErrorTest.testUndefinedResources*
            PJitErrorTest.test_aot_error_on_dced_avals_mismatch PJitErrorTest.test_pjit_with_deleted_input_*
            ShardingInTypesTest.test_broadcasting_nary_error
        """,
        "the call works, and does not raise jax's error": """
            JitTest.test_jit_of_nonweakreferenceable_function ArrayPjitTest.test_jit_with_mesh_context_manager
            ShardingInTypesTest.test_pspec_einsum_no_context_mesh
        """,
        "arguments and results that are not arrays are static: strings, enums, Python numbers, tokens": """
            JitTest.test_jit_bad_input JitTest.test_trivial_computations_with_tokens
            JitTest.test_jit_with_mismatched_static_argnames ArrayPjitTest.test_pjit_with_mismatched_static_argnames
            APITest.test_bad_input APITest.test_returned_non_jaxtype APITest.test_jit_returning_token
            ArrayPjitTest.test_trivial_computation_with_replicated_literal NamedCallTest.test_integer_overflow*
        """,
        "a parameter is the same by position and by keyword: one program, and the same `args_info`": """
            JitTest.test_dict_donation_* JitTest.test_jit_kwargs* ArrayPjitTest.test_pjit_kwargs
        """,
        "a compiled function also takes static arguments, and checks them": """
            ArrayPjitTest.testLowerCompileWithStaticArguments
        """,
        "`ft.jit` has no `device=` and no `backend=`; the error names the replacement": """
            *Test.test_jit_device *Test.test_jit_device_with_sharding_constraint_error *Test.test_pjit_device_backend_*
            *Test.test_pjit_mesh_with_device_or_backend_error *Test.test_pjit_no_global_cache_hit_axis_resources
            *Test.test_autodiff_with_device_arg *Test.test_pjit_with_device_arg*
            ArrayPjitTest.test_vmap_pjit_single_device
        """,
        "a sharding on one device is not a layout, since layouts are for meshes": """
            ArrayPjitTest.test_single_device_sharding_preserved ArrayPjitTest.test_wsc_eager_copy
            ArrayPjitTest.test_to_gspmd_sharding_cache_with_and_without_device APITest.test_eval_shape_out_shardings
        """,
        "a function runs on one mesh; arrays on another mesh, or on other axis types, are refused by path": """
            ArrayPjitTest.test_abstract_mesh_lower_same_size_different_axis_name
            ArrayPjitTest.test_pmap_sharding_input_pjit_in_axis_resources
            ShardingInTypesTest.test_inputs_different_context
        """,
        "on Explicit axes, `in_shardings` refuses an uncommitted array": """
            ShardingInTypesTest.test_in_aval_matches_in_sharding
        """,
        "`None` in `out_shardings` leaves the sharding to the compiler, on every kind of mesh": """
            PJitTest.testBasic1D PJitTest.testBasic1DWithMeshContextManager PJitTest.testShardingConstraintStablehlo
            PJitTest.testUnevenShardingConstraint
        """,
        "layouts refuse partial sums": "ShardingInTypesTest.test_identity_jit_out_unreduced",
        "jax's sentinel for an unspecified sharding is private": """
            ArrayPjitTest.test_jit_partially_specified_shardings
        """,
        "nothing is donated in a trace": "ArrayPjitTest.test_jit_no_forwarding",
        "two arrays that share one NumPy array's memory must not both be donated": """
            PJitTest.testBufferDonationWith*
        """,
        "different devices, or a different mesh, need their own program and trace": """
            *Test.test_lowering_cache_hit_* *Test.test_different_devices_*_cache_hit
            PJitTest.test_jax_set_mesh_trace_only_once ArrayPjitTest.test_wsc_aval_cache_hit
            ShardingInTypesTest.test_compilation_cache_miss_when_devices_change
        """,
        "jax traces the body of `ft.jit`, so it does not reuse a trace from `jax.eval_shape`": """
            APITest.test_eval_shape_trace_cache_share ShardingInTypesTest.test_eval_shape_jitted_fun_cache_hit
        """,
        "calls with abstract arrays are refused; the error suggests `lower` or `eval_shape`": """
            APITest.test_eval_shape_nested_jit_sds
        """,
        "an array's type is not an argument; `jax.ShapeDtypeStruct` is": """
            ArrayPjitTest.test_array_lower_compile ArrayPjitTest.test_pjit_array_same_sharding_aot
            PJitTest.testLowerCompileWithAvals ShardingInTypesTest.test_shaped_array_input_to_jit_no_sharding
        """,
        "a ref is not an argument": "ShardMapTest.test_mutable_array_arg_basic",
        "a function's closure is freed by the next garbage collection": "JitTest.test_jit_reference_dropping",
        "it checks a private attribute, text or count of jax's wrapper, jaxpr or caches": """
            APITest.test_clear_cache JitTest.test_fun_name JitTest.test_jit_repr* JitTest.test_jit_lower_no_pruning
            JitTest.test_jit_cache_clear
            ArrayPjitTest.test_pjit_keep_unused_* ArrayPjitTest.test_jit_cpp_cache_obj_config
            APITest.test_cache_miss_explanations_* PJitTest.testLowerCompile PJitTest.testVMapShardingConstraint*
            TracebackTest.test_jit_traceback
            OverrideLoweringTest.test_sharding_constraint_as_noop UtilTest.test_get_intermediate_shardings
        """,
        "the translation passes the mesh of the deprecated `with mesh:` only to `ft.jit`": """
            PJitTest.testDifferentNestedMesh PJitTest.testSameNestedMesh ArrayPjitTest.test_list_in_pspec
        """,
        "the translation turns Python numbers into arrays, which changes traces, logs and types": """
            JitTest.test_jit_with_pruned_args* APITest.test_user_trace_context_hooks
            ShardingInTypesTest.test_auto_axes_inside_scan
        """,
    },
    "equinox": {},
    "haliax": {
        "haliax does not find the devices under `jax.set_mesh`; its own `named_jit` fails too": """
            test_partitioning.test_cross_device_sharding test_partitioning.test_infer_named_axes
            test_partitioning.test_named_jit_no_in_axis_resources test_partitioning.test_pjit_class_init_with_args
            test_partitioning.test_shard_with_axis_mapping_outside_pjit
        """,
    },
}
