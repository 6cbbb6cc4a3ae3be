"""The dtypes that PyTorch refuses on the CPU, by overload (torch 2.13.0).

``python tests/lib/refused_dtypes.py`` writes this file. A group has the overloads of aten in which
PyTorch refuses the same; those called "default" have only the operator's name.

REFUSED    (the place of the argument whose dtype is looked at, or -1 for dtype=, the modes as
           bridge.operators.dtype_refusals.mode says them, with " | " between them and "" for every
           mode, the dtypes): the overloads
TOGETHER   (the place of an argument, the places of those that must have its dtype): the overloads
INDICES    (the place of an index, the dtypes): the overloads
"""

REFUSED: dict[tuple[int, str, str], str] = {
    (-1, "", "bool"): "linspace logspace",
    (-1, "", "complex64 complex128"): "randint randint.low",
    (-1, "", "complex64 complex128 bool"): "arange arange.start arange.start_step randperm range range.step",
    (-1, "", "int8 int16 int32 int64 uint8 bool"): "rand randn",
    (0, "", "bfloat16 float16"): "linalg_eig",
    (0, "", "bfloat16 float16 complex64 complex128"): (
        "special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_chebyshev_polynomial_t "
        "special_chebyshev_polynomial_u special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_erfcx "
        "special_hermite_polynomial_h special_hermite_polynomial_he special_laguerre_polynomial_l special_legendre_polynomial_p "
        "special_log_ndtr special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 "
        "special_ndtri special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t "
        "special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w "
        "special_spherical_bessel_j0 special_zeta"
    ),
    (0, "", "bfloat16 float16 complex64 complex128 int8 int16 int32 int64 bool"): "_upsample_bilinear2d_aa",
    (0, "", "bfloat16 float16 complex64 complex128 int8 int16 int32 int64 uint8 bool"): (
        "_ctc_loss.Tensor _ctc_loss _fft_r2c _histogramdd_bin_edges _histogramdd_from_bin_cts"
    ),
    (0, "", "bfloat16 float16 complex64 complex128 int8 int16 int32 uint8 bool"): "avg_pool3d",
    (0, "", "bfloat16 float16 int8 int16 int32 int64 uint8 bool"): (
        "_linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex _linalg_svd cholesky cholesky_inverse cholesky_solve geqrf "
        "linalg_cholesky_ex linalg_householder_product linalg_inv_ex linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq linalg_lu "
        "linalg_lu_factor_ex linalg_lu_solve linalg_qr linalg_solve_triangular ormqr triangular_solve"
    ),
    (0, "", "bool"): (
        "_trilinear abs addcmul bmm dot linalg_cross mm mv neg pow.Tensor_Tensor reflection_pad1d reflection_pad2d reflection_pad3d "
        "replication_pad1d replication_pad2d replication_pad3d rsub.Scalar sub.Scalar sub.Tensor trace vdot"
    ),
    (0, "", "complex64 complex128"): (
        "atan2 bernoulli_.float clamp.Tensor clamp clamp_max.Tensor clamp_min.Tensor clamp_min copysign.Scalar copysign.Tensor cummax "
        "cummin deg2rad digamma erf erfc erfinv fmax fmin ge.Scalar ge.Tensor gt.Scalar gt.Tensor heaviside i0 isneginf isposinf "
        "le.Scalar le.Tensor lgamma logit lt.Scalar lt.Tensor maximum minimum mode rad2deg random_ searchsorted.Scalar sign signbit "
        "sort.stable special_entr special_i0e special_i1 special_i1e special_xlog1py unique_dim xlogy.Tensor"
    ),
    (0, "", "complex64 complex128 bool"): (
        "abs_ ceil convolution floor floor_divide fmod.Tensor geometric_ hardtanh isin.Tensor_Tensor kthvalue max_pool2d_with_indices "
        "max_pool3d_with_indices mvlgamma relu remainder.Tensor round searchsorted.Tensor threshold trunc"
    ),
    (0, "", "complex64 complex128 int8 int16 int32 int64 bool"): (
        "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_bicubic2d upsample_bilinear2d "
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d"
    ),
    (0, "", "complex64 complex128 int8 int16 int32 int64 uint8 bool"): (
        "_adaptive_avg_pool2d _adaptive_avg_pool3d _batch_norm_with_update _cdist_forward _embedding_bag_forward_only "
        "_native_batch_norm_legit _native_batch_norm_legit.no_stats _safe_softmax _scaled_dot_product_flash_attention_for_cpu "
        "_softmax_backward_data adaptive_max_pool2d adaptive_max_pool3d cauchy_ celu elu exponential_ frac fractional_max_pool2d "
        "fractional_max_pool3d frexp.Tensor gelu glu grid_sampler_2d grid_sampler_3d hardshrink hardsigmoid hardswish huber_loss hypot "
        "igamma igammac leaky_relu log_normal_ logaddexp2 max_pool2d_with_indices_backward max_unpool2d max_unpool3d mish multinomial "
        "native_batch_norm native_group_norm native_layer_norm nextafter nll_loss2d_forward nll_loss_forward round.decimals "
        "segment_reduce softplus softshrink upsample_linear1d upsample_trilinear3d"
    ),
    (0, "", "complex64 complex128 int8 int16 int32 uint8 bool"): "avg_pool2d",
    (0, "", "float32 float64 bfloat16 float16 complex64 complex128"): (
        "bitwise_and.Tensor bitwise_not bitwise_or.Tensor bitwise_xor.Tensor"
    ),
    (0, "", "float32 float64 bfloat16 float16 complex64 complex128 bool"): (
        "bincount bitwise_left_shift.Tensor bitwise_right_shift.Tensor gcd lcm"
    ),
    (0, "", "float32 float64 bfloat16 float16 int8 int16 int32 int64 uint8 bool"): "_fft_c2c _fft_c2r",
    (0, "", "int8 int16 int32 int64 uint8"): "im2col",
    (0, "", "int8 int16 int32 int64 uint8 bool"): (
        "addcdiv embedding_renorm_ lerp.Scalar lerp.Tensor linalg_matrix_exp logaddexp norm.ScalarOpt_dim normal.Tensor_float normal_ "
        "rand_like renorm silu std.correction std_mean.correction uniform_ var.correction var_mean.correction"
    ),
    (0, " | scalar", "bfloat16 complex64 complex128 int8 int16 int32 int64 uint8 bool"): "complex",
    (0, " | scalar", "bfloat16 float16 complex64 complex128 int8 int16 int32 int64 uint8 bool"): "multilabel_margin_loss_forward polar",
    (0, " | scalar", "bool"): "addbmm addmm addmv baddbmm rsub.Tensor",
    (0, " | scalar", "complex64 complex128"): (
        "_unique2 amax amin aminmax hash_tensor max max.dim min min.dim nansum randint_like randint_like.low_dtype sort "
        "unique_consecutive"
    ),
    (0, " | scalar", "complex64 complex128 bool"): "argmax argmin bucketize.Tensor median median.dim nanmedian nanmedian.dim topk",
    (0, " | scalar", "complex64 complex128 int8 int16 int32 int64 uint8 bool"): (
        "_log_softmax _prelu_kernel _softmax bernoulli histc log_sigmoid_forward mse_loss smooth_l1_loss"
    ),
    (0, " | scalar", "int8 int16 int32 int64 uint8 bool"): (
        "dist linalg_vector_norm logcumsumexp mean mean.dim normal.Tensor_Tensor randn_like soft_margin_loss"
    ),
    (0, " | scalar weight=None", "bfloat16 float16 complex64 complex128 int8 int16 int32 int64 uint8 bool"): (
        "histogram.bin_ct multi_margin_loss"
    ),
    (0, " | scalar weight=None", "complex64 complex128 int8 int16 int32 int64 uint8 bool"): "binary_cross_entropy",
    (0, " | scalar weight=None pos_weight=None", "complex64 complex128 int8 int16 int32 int64 uint8 bool"): (
        "binary_cross_entropy_with_logits"
    ),
    (0, "bias=None 1d transposed | bias=None 2d transposed | bias=None 3d transposed | bias=Tensor 1d transposed | bias=Tensor 2d transposed | bias=Tensor 3d transposed", "int8 int16 int32 uint8"): (
        "convolution"
    ),
    (0, "min=Tensor max=Tensor", "bool"): "clamp.Tensor",
    (0, "reduce=amax | reduce=amin", "complex64 complex128"): "index_reduce",
    (0, "reduce=amax | reduce=amin | scalar reduce=amax | scalar reduce=amin", "complex64 complex128"): "scatter_reduce.two",
    (0, "reduce=mean", "bool"): "index_reduce",
    (0, "reduce=mean | scalar reduce=mean", "bool"): "scatter_reduce.two",
    (0, "rounding_mode=floor | rounding_mode=trunc", "complex64 complex128 bool"): "div.Tensor_mode",
    (0, "scalar reduce=amax | scalar reduce=amin | scalar reduce=mean | scalar reduce=prod", "complex64 complex128 bool"): "index_reduce",
    (1, "", "complex64 complex128"): "polygamma",
}

TOGETHER: dict[tuple[int, ...], str] = {
    (0, 1): (
        "_cdist_forward _linalg_solve_ex _prelu_kernel _softmax_backward_data binary_cross_entropy bmm cholesky_solve complex "
        "convolution dot grid_sampler_2d grid_sampler_3d linalg_cross linalg_householder_product linalg_lstsq "
        "max_pool2d_with_indices_backward mm mv polar triangular_solve vdot"
    ),
    (0, 1, 2): "_scaled_dot_product_flash_attention_for_cpu _trilinear addbmm addmm addmv baddbmm native_group_norm ormqr",
    (0, 1, 2, 3, 4): "_batch_norm_with_update _native_batch_norm_legit native_batch_norm",
    (0, 2): "index_put linalg_ldl_solve linalg_lu_solve masked_scatter nll_loss2d_forward nll_loss_forward put",
    (0, 2, 3): "native_layer_norm",
    (0, 3): (
        "_unsafe_masked_index_put_accumulate fractional_max_pool2d fractional_max_pool3d index_add index_copy index_reduce "
        "scatter.reduce scatter.src scatter_add scatter_reduce.two"
    ),
    (0, 4): "multi_margin_loss",
    (0, 6): "_embedding_bag_forward_only",
}

INDICES: dict[tuple[int, str], str] = {
    (1, "float32"): "_embedding_bag_forward_only",
    (1, "int16 bool float32"): "nll_loss_forward",
    (1, "int16 uint8 bool float32"): (
        "_ctc_loss.Tensor _ctc_loss embedding embedding_renorm_ max_unpool2d max_unpool3d multi_margin_loss "
        "multilabel_margin_loss_forward nll_loss2d_forward put take"
    ),
    (2, "float32"): "_embedding_bag_forward_only",
    (2, "int16 uint8 bool float32"): (
        "gather index_add index_copy index_fill.int_Scalar index_fill.int_Tensor index_reduce index_select scatter.reduce scatter.src "
        "scatter_add scatter_reduce.two"
    ),
    (7, "int16 uint8 bool float32"): "max_pool2d_with_indices_backward",
}
