//! Generates the C++ half of the bridge. csrc/CMakeLists.txt compiles what it declares.

use std::{env, path::PathBuf};

fn main() {
    let here = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let mut build = cxx_build::bridge("src/bridge.rs");
    build.include(here.join("../../csrc")).flag_if_supported("-std=c++20").warnings(false);
    let torch = env::var("STOCACHE_TORCH_INCLUDE")
        .expect("STOCACHE_TORCH_INCLUDE names torch's include folder; build with `pip install --no-build-isolation .`");
    for dir in torch.split(':') {
        build.include(dir);
    }
    build.compile("stocache_bridge");
    println!("cargo:rerun-if-changed=src/bridge.rs");
    println!("cargo:rerun-if-changed=../../csrc/tensor/tensor.h");
    println!("cargo:rerun-if-env-changed=STOCACHE_TORCH_INCLUDE");
}
