"""Why tests of the peers fail with `ft.jit`: what functree does otherwise on purpose, and the tests
that say so.

For each peer the reasons, each with the names of tests, as patterns of `fnmatch`.
"""

REASONS: dict[str, dict[str, str]] = {
    "jax": {
        "an error is expected, and raised: by functree, in its own class and words": """
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
        "the error of jax does not arise: the call works": """
            JitTest.test_jit_of_nonweakreferenceable_function ArrayPjitTest.test_jit_with_mesh_context_manager
            ShardingInTypesTest.test_pspec_einsum_no_context_mesh
        """,
        "what is not an array is static, among arguments and results: texts, enums, Python's numbers, tokens": """
            JitTest.test_jit_bad_input JitTest.test_trivial_computations_with_tokens
            JitTest.test_jit_with_mismatched_static_argnames ArrayPjitTest.test_pjit_with_mismatched_static_argnames
            APITest.test_bad_input APITest.test_returned_non_jaxtype APITest.test_jit_returning_token
            ArrayPjitTest.test_trivial_computation_with_replicated_literal NamedCallTest.test_integer_overflow*
        """,
        "a parameter is one, given by position or by name: `args_info`, and one program for both": """
            JitTest.test_dict_donation_* JitTest.test_jit_kwargs* ArrayPjitTest.test_pjit_kwargs
        """,
        "a compiled call takes the static arguments too, and checks them": """
            ArrayPjitTest.testLowerCompileWithStaticArguments
        """,
        "there is no `device=` and no `backend=`; the error says what to write": """
            *Test.test_jit_device *Test.test_jit_device_with_sharding_constraint_error *Test.test_pjit_device_backend_*
            *Test.test_pjit_mesh_with_device_or_backend_error *Test.test_pjit_no_global_cache_hit_axis_resources
            *Test.test_autodiff_with_device_arg *Test.test_pjit_with_device_arg*
            ArrayPjitTest.test_vmap_pjit_single_device
        """,
        "a sharding on one device is no layout: layouts are for meshes": """
            ArrayPjitTest.test_single_device_sharding_preserved ArrayPjitTest.test_wsc_eager_copy
            ArrayPjitTest.test_to_gspmd_sharding_cache_with_and_without_device APITest.test_eval_shape_out_shardings
        """,
        "a function runs on one mesh: arrays on another one, or on one with other axis types, are refused by path": """
            ArrayPjitTest.test_abstract_mesh_lower_same_size_different_axis_name
            ArrayPjitTest.test_pmap_sharding_input_pjit_in_axis_resources
            ShardingInTypesTest.test_inputs_different_context
        """,
        "on Explicit axes `in_shardings` refuses an array that nobody has placed": """
            ShardingInTypesTest.test_in_aval_matches_in_sharding
        """,
        "`None` in `out_shardings` leaves the sharding to the compiler, under every kind of mesh": """
            PJitTest.testBasic1D PJitTest.testBasic1DWithMeshContextManager PJitTest.testShardingConstraintStablehlo
            PJitTest.testUnevenShardingConstraint
        """,
        "partial sums are refused in layouts": "ShardingInTypesTest.test_identity_jit_out_unreduced",
        "the sentinel of jax for what is not specified is private": """
            ArrayPjitTest.test_jit_partially_specified_shardings
        """,
        "in a trace nothing is donated": "ArrayPjitTest.test_jit_no_forwarding",
        "two arrays over the memory of one array of numpy may not both be donated": """
            PJitTest.testBufferDonationWith*
        """,
        "other devices, or another mesh, are another program with its own trace": """
            *Test.test_lowering_cache_hit_* *Test.test_different_devices_*_cache_hit
            PJitTest.test_jax_set_mesh_trace_only_once ArrayPjitTest.test_wsc_aval_cache_hit
            ShardingInTypesTest.test_compilation_cache_miss_when_devices_change
        """,
        "the function that jax traces is the body of `ft.jit`, which it does not know from `jax.eval_shape`": """
            APITest.test_eval_shape_trace_cache_share ShardingInTypesTest.test_eval_shape_jitted_fun_cache_hit
        """,
        "calls with abstract arrays run nothing: `lower` or `eval_shape` is asked for": """
            APITest.test_eval_shape_nested_jit_sds
        """,
        "a type of an array is no argument: `jax.ShapeDtypeStruct` is": """
            ArrayPjitTest.test_array_lower_compile ArrayPjitTest.test_pjit_array_same_sharding_aot
            PJitTest.testLowerCompileWithAvals ShardingInTypesTest.test_shaped_array_input_to_jit_no_sharding
        """,
        "a ref is no argument": "ShardMapTest.test_mutable_array_arg_basic",
        "what a function closes over is freed by the next garbage collection": "JitTest.test_jit_reference_dropping",
        "it asks for a private attribute, a text or a count of jax: of the wrapper, of the jaxpr, of its caches": """
            APITest.test_clear_cache JitTest.test_fun_name JitTest.test_jit_repr* JitTest.test_jit_lower_no_pruning
            JitTest.test_jit_cache_clear
            ArrayPjitTest.test_pjit_keep_unused_* ArrayPjitTest.test_jit_cpp_cache_obj_config
            APITest.test_cache_miss_explanations_* PJitTest.testLowerCompile PJitTest.testVMapShardingConstraint*
            TracebackTest.test_jit_traceback
            OverrideLoweringTest.test_sharding_constraint_as_noop UtilTest.test_get_intermediate_shardings
        """,
        "the translation gives the mesh of the deprecated `with mesh:` to `ft.jit` alone": """
            PJitTest.testDifferentNestedMesh PJitTest.testSameNestedMesh ArrayPjitTest.test_list_in_pspec
        """,
        "the translation itself makes arrays of Python's numbers, which is traced, logged or typed too": """
            JitTest.test_jit_with_pruned_args* APITest.test_user_trace_context_hooks
            ShardingInTypesTest.test_auto_axes_inside_scan
        """,
    },
    "equinox": {},
    "haliax": {
        "haliax does not find the devices under `jax.set_mesh`: with its own `named_jit` they fail too": """
            test_partitioning.test_cross_device_sharding test_partitioning.test_infer_named_axes
            test_partitioning.test_named_jit_no_in_axis_resources test_partitioning.test_pjit_class_init_with_args
            test_partitioning.test_shard_with_axis_mapping_outside_pjit
        """,
    },
}
