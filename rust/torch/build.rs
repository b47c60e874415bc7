//! Generates the C++ half of the bridge, which csrc/CMakeLists.txt compiles for each torch.

fn main() {
    // It says how to compile what it wrote; that needs torch, and Rust does not.
    let _compiler = cxx_build::bridge("src/bridge.rs");
    println!("cargo:rerun-if-changed=src/bridge.rs");
}
