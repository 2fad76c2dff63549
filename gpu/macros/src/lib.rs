//! `#[kernel]`: both sides of a kernel from one signature.
//!
//! ```text
//! /// What it does.
//! #[kernel(threads = 256, min_blocks = 1, barriers = 2, registers = 64, requires(args.row_bytes % 16 == 0))]
//! pub unsafe fn dispatch(args: DispatchArgs) { .. }
//! ```
//!
//! On the device this is the PTX entry `dispatch`. On the host it is a type `Dispatch` that implements
//! `epoxide_gpu::kernels::Kernel`: its `INFO` goes into the manifest that `cargo xtask build-ptx` checks the PTX
//! against, and `Dispatch::call(args)` checks every `requires` clause and gives a call that only fits this kernel.

use proc_macro::TokenStream;
use quote::{format_ident, quote};
use syn::parse::{Parse, ParseStream};
use syn::punctuated::Punctuated;
use syn::{BinOp, Expr, FnArg, Ident, ItemFn, LitInt, Pat, Token, parenthesized, parse_macro_input};

/// The attribute's arguments.
struct Contract {
    threads: u32,
    min_blocks: u32,
    barriers: u32,
    registers: u32,
    requires: Vec<Expr>,
}

impl Parse for Contract {
    fn parse(input: ParseStream) -> syn::Result<Self> {
        let mut contract =
            Contract { threads: 0, min_blocks: 1, barriers: 0, registers: 255, requires: Vec::new() };
        while !input.is_empty() {
            let key: Ident = input.parse()?;
            if key == "requires" {
                let clauses;
                parenthesized!(clauses in input);
                contract.requires =
                    Punctuated::<Expr, Token![,]>::parse_terminated(&clauses)?.into_iter().collect();
            } else {
                input.parse::<Token![=]>()?;
                let value = input.parse::<LitInt>()?.base10_parse()?;
                match key.to_string().as_str() {
                    "threads" => contract.threads = value,
                    "min_blocks" => contract.min_blocks = value,
                    "barriers" => contract.barriers = value,
                    "registers" => contract.registers = value,
                    _ => {
                        let text = "expected threads, min_blocks, barriers, registers or requires(..)";
                        return Err(syn::Error::new(key.span(), text));
                    }
                }
            }
            if !input.is_empty() {
                input.parse::<Token![,]>()?;
            }
        }
        if contract.threads == 0 {
            return Err(input.error("a kernel names its most threads per block: threads = N"));
        }
        Ok(contract)
    }
}

/// Writes the PTX entry and the host's launcher. See the crate's documentation.
#[proc_macro_attribute]
pub fn kernel(attr: TokenStream, item: TokenStream) -> TokenStream {
    let contract = parse_macro_input!(attr as Contract);
    let function = parse_macro_input!(item as ItemFn);
    expand(contract, function).unwrap_or_else(syn::Error::into_compile_error).into()
}

fn expand(contract: Contract, function: ItemFn) -> syn::Result<proc_macro2::TokenStream> {
    let docs: Vec<_> = function.attrs.iter().filter(|a| a.path().is_ident("doc")).collect();
    let name = &function.sig.ident;
    let (body_name, type_name) =
        (format_ident!("{name}_body"), format_ident!("{}", camel_case(&name.to_string())));
    let block = &function.block;
    let [FnArg::Typed(argument)] = function.sig.inputs.iter().collect::<Vec<_>>()[..] else {
        return Err(syn::Error::new_spanned(
            &function.sig.inputs,
            "a kernel takes one #[repr(C)] Pod struct",
        ));
    };
    let Pat::Ident(arg) = &*argument.pat else {
        return Err(syn::Error::new_spanned(&argument.pat, "name the argument struct"));
    };
    if function.sig.unsafety.is_none() {
        return Err(syn::Error::new_spanned(
            &function.sig,
            "a kernel trusts its addresses: write `unsafe fn`",
        ));
    }
    let (arg, arg_type) = (&arg.ident, &argument.ty);

    let checks = contract.requires.iter().map(|clause| {
        let text = quote!(#clause).to_string();
        // For a comparison the error shows what its left and right sides came to.
        let values = match clause {
            Expr::Binary(b) if is_comparison(&b.op) => {
                let (left, right) = (&b.left, &b.right);
                quote!(format!("{:?} against {:?}", #left, #right))
            }
            _ => quote!(String::from("false")),
        };
        quote! {
            if !(#clause) {
                return Err(crate::kernels::ContractError { kernel: stringify!(#name), clause: #text, values: #values });
            }
        }
    });
    // The host has checked every clause before the launch, so the device may build on them: divisions by a clause's
    // non-zero value, for one, need no trap.
    let assumptions = &contract.requires;
    let Contract { threads, min_blocks, barriers, registers, .. } = contract;

    Ok(quote! {
        #(#docs)*
        ///
        /// # Safety
        /// The addresses in the argument struct are live and as its fields say.
        #[cfg_attr(not(target_arch = "nvptx64"), allow(dead_code))]
        #[inline(always)]
        unsafe fn #body_name(#arg: #arg_type) {
            // SAFETY: the caller vouches for the addresses, and the head of the kernel's file says what makes its use of them
            // sound. The clauses hold, since `Kernel::call` is the only way to a launch.
            unsafe {
                #(core::hint::assert_unchecked(#assumptions);)*
                #block
            }
        }

        // The entry's ABI is the one thing that differs between the two backends.
        #[cfg(all(target_arch = "nvptx64", not(epoxide_backend = "nvvm")))]
        #[unsafe(no_mangle)]
        unsafe extern "ptx-kernel" fn #name(#arg: #arg_type) {
            // SAFETY: the launcher vouches for the addresses.
            unsafe { #body_name(#arg) }
        }
        #[cfg(all(target_arch = "nvptx64", epoxide_backend = "nvvm"))]
        #[unsafe(no_mangle)]
        #[nvvm_internal::kernel()]
        unsafe extern "C" fn #name(#arg: #arg_type) {
            // SAFETY: the launcher vouches for the addresses.
            unsafe { #body_name(#arg) }
        }

        #(#docs)*
        #[cfg(not(target_arch = "nvptx64"))]
        #[derive(Clone, Copy, Debug)]
        pub struct #type_name;

        #[cfg(not(target_arch = "nvptx64"))]
        impl crate::kernels::Kernel for #type_name {
            type Args = #arg_type;
            const INFO: crate::kernels::KernelInfo = crate::kernels::KernelInfo {
                name: stringify!(#name),
                params: &[crate::kernels::ParamLayout {
                    name: stringify!(#arg),
                    size: size_of::<#arg_type>(),
                    align: align_of::<#arg_type>(),
                }],
                max_threads: #threads,
                min_blocks_per_sm: #min_blocks,
                barriers: #barriers,
                max_registers: #registers,
                local_depot_allowed: None,
                traps_allowed: 0,
            };
            fn call(#arg: #arg_type) -> Result<crate::kernels::Call<Self>, crate::kernels::ContractError> {
                #(#checks)*
                Ok(crate::kernels::Call::new(#arg))
            }
        }
    })
}

fn is_comparison(op: &BinOp) -> bool {
    matches!(op, BinOp::Eq(_) | BinOp::Ne(_) | BinOp::Lt(_) | BinOp::Le(_) | BinOp::Gt(_) | BinOp::Ge(_))
}

fn camel_case(name: &str) -> String {
    name.split('_')
        .flat_map(|word| {
            let mut chars = word.chars();
            chars.next().map(|c| c.to_uppercase().collect::<String>() + chars.as_str())
        })
        .collect()
}
