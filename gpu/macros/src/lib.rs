//! `#[kernel]`: both sides of a kernel from one signature.
//!
//! ```text
//! /// What it does.
//! #[kernel(threads = 256, requires(len >= 1))]
//! pub unsafe fn add_bias(data: DevicePtr, len: u32, bias: u32) { .. }
//! ```
//!
//! On the device this is the PTX entry `add_bias`. On the host it is a type `AddBias` that implements
//! `epoxide_gpu::kernels::Entry`: its `INFO` goes into the manifest that `cargo xtask build-ptx` checks the PTX
//! against, and `AddBias::call(data, len, bias)` checks every `requires` clause and gives a call that only fits this kernel.
//!
//! A kernel of one parameter takes it as it is, a `#[repr(C)]` struct that is `Pod`: several kernels can share one so. Of several parameters,
//! which are `DevicePtr` or numbers of 4 or 8 bytes, the attribute makes such a struct.

#![forbid(unsafe_code)]

use proc_macro::TokenStream;
use quote::{format_ident, quote};
use syn::parse::{Parse, ParseStream};
use syn::punctuated::Punctuated;
use syn::{BinOp, Expr, FnArg, Ident, ItemFn, LitInt, Pat, Token, Type, parenthesized, parse_macro_input};

/// The attribute's arguments.
struct Contract {
    threads: u32,
    min_blocks: u32,
    barriers: u32,
    registers: u32,
    dependent: bool,
    requires: Vec<Expr>,
}

impl Parse for Contract {
    fn parse(input: ParseStream) -> syn::Result<Self> {
        let mut contract = Contract {
            threads: 0,
            min_blocks: 1,
            barriers: 0,
            registers: 255,
            dependent: false,
            requires: Vec::new(),
        };
        while !input.is_empty() {
            let key: Ident = input.parse()?;
            if key == "requires" {
                let clauses;
                parenthesized!(clauses in input);
                contract.requires =
                    Punctuated::<Expr, Token![,]>::parse_terminated(&clauses)?.into_iter().collect();
            } else if key == "dependent" {
                contract.dependent = true;
            } else {
                input.parse::<Token![=]>()?;
                let value = input.parse::<LitInt>()?.base10_parse()?;
                match key.to_string().as_str() {
                    "threads" => contract.threads = value,
                    "min_blocks" => contract.min_blocks = value,
                    "barriers" => contract.barriers = value,
                    "registers" => contract.registers = value,
                    _ => {
                        let text =
                            "expected threads, min_blocks, barriers, registers, dependent or requires(..)";
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
    let parameters = function.sig.inputs.iter().map(parameter).collect::<syn::Result<Vec<_>>>()?;
    if function.sig.unsafety.is_none() {
        return Err(syn::Error::new_spanned(
            &function.sig,
            "a kernel trusts its addresses: write `unsafe fn`",
        ));
    }
    let Arguments { arg, arg_type, declaration, names } =
        arguments(&parameters, &type_name, &function.sig.inputs)?;
    let types: Vec<_> = match &names[..] {
        [] => vec![&arg_type],
        _ => parameters.iter().map(|(_, of)| *of).collect(),
    };
    // What a call takes, and how the argument struct is made of it: what is reserved is zero.
    let (taken, made): (Vec<_>, _) = match &names[..] {
        [] => (vec![&arg], quote!(#arg)),
        names => (names.to_vec(), quote!(#arg_type { #(#names,)* ..bytemuck::Zeroable::zeroed() })),
    };
    let unpacked = if names.is_empty() { quote!() } else { quote!(let #arg_type { #(#names,)* .. } = #arg;) };
    let looked_at: Vec<&Ident> = taken.clone();

    let checks = contract.requires.iter().map(|clause| {
        let text = quote!(#clause).to_string();
        let values = values_of(clause, &looked_at);
        quote! {
            if !(#clause) {
                return Err(crate::kernels::ContractError { kernel: stringify!(#name), clause: #text, values: #values });
            }
        }
    });
    // The host has checked every clause before the launch, so the device may build on them: divisions by a clause's
    // non-zero value, for one, need no trap.
    let assumptions = &contract.requires;
    let Contract { threads, min_blocks, barriers, registers, dependent, .. } = contract;
    // In front of everything else, so that a launch may count on it.
    let wait = dependent.then(|| quote! { crate::simt::griddepcontrol_wait(); });

    Ok(quote! {
        #declaration

        #(#docs)*
        ///
        /// # Safety
        /// The addresses in the argument struct are live and as its fields say.
        #[cfg_attr(not(target_arch = "nvptx64"), allow(dead_code))]
        #[inline(always)]
        unsafe fn #body_name(#arg: #arg_type) {
            // SAFETY: the caller vouches for the addresses, and the head of the kernel's file says what makes its use of them
            // sound. The clauses hold, since `call` is the only way to a launch.
            unsafe {
                #wait
                #unpacked
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
        impl crate::kernels::Entry for #type_name {
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
                dependent: #dependent,
                local_depot_allowed: None,
                traps_allowed: 0,
            };
        }

        #[cfg(not(target_arch = "nvptx64"))]
        impl #type_name {
            /// What its PTX must look like.
            pub const INFO: crate::kernels::KernelInfo = <Self as crate::kernels::Entry>::INFO;

            /// Checks the clauses, and gives the call for a launch.
            ///
            /// # Errors
            /// The clause that does not hold, with the values it looks at.
            #[allow(clippy::too_many_arguments)]
            pub fn call(#(#taken: #types),*) -> Result<crate::kernels::Call<Self>, crate::kernels::ContractError> {
                #(#checks)*
                Ok(crate::kernels::Call::new(#made))
            }
        }
    })
}

/// A parameter's name and type.
fn parameter(input: &FnArg) -> syn::Result<(&Ident, &Type)> {
    let FnArg::Typed(argument) = input else {
        return Err(syn::Error::new_spanned(input, "a kernel has no self"));
    };
    let Pat::Ident(name) = &*argument.pat else {
        return Err(syn::Error::new_spanned(&argument.pat, "name the parameter"));
    };
    Ok((&name.ident, &argument.ty))
}

/// The one struct that a kernel takes.
struct Arguments<'f> {
    arg: Ident,
    arg_type: Type,
    /// Where the attribute makes it: its declaration, and the kernel's parameters.
    declaration: proc_macro2::TokenStream,
    names: Vec<&'f Ident>,
}

fn arguments<'f>(
    parameters: &[(&'f Ident, &'f Type)],
    type_name: &Ident,
    inputs: &impl quote::ToTokens,
) -> syn::Result<Arguments<'f>> {
    match parameters {
        [] => Err(syn::Error::new_spanned(inputs, "a kernel takes at least one parameter")),
        [(name, of)] => Ok(Arguments {
            arg: (*name).clone(),
            arg_type: (*of).clone(),
            declaration: quote!(),
            names: Vec::new(),
        }),
        several => {
            let struct_name = format_ident!("{type_name}Args");
            let sizes = several.iter().map(|(_, of)| size_of_type(of)).collect::<syn::Result<Vec<_>>>()?;
            // The large ones first, so that nothing lies between them; what is missing at the end is written out.
            let of_size =
                |size| several.iter().zip(&sizes).filter(move |(_, is)| **is == size).map(|(one, _)| one);
            let fields = of_size(8).chain(of_size(4)).map(|(name, of)| quote!(#name: #of));
            let odd = of_size(8).next().is_some() && of_size(4).count() % 2 == 1;
            let reserved = odd.then(|| quote!(reserved: u32,));
            let text = format!("Arguments of `{type_name}`.");
            Ok(Arguments {
                arg: format_ident!("args"),
                arg_type: syn::parse_quote!(#struct_name),
                declaration: quote! {
                    #[doc = #text]
                    #[doc(hidden)]
                    #[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
                    #[repr(C)]
                    pub struct #struct_name { #(#fields,)* #reserved }
                },
                names: several.iter().map(|(name, _)| *name).collect(),
            })
        }
    }
}

/// Bytes of a parameter among several.
fn size_of_type(of: &Type) -> syn::Result<usize> {
    let name = match of {
        Type::Path(path) => path.path.segments.last().map(|last| last.ident.to_string()),
        _ => None,
    };
    match name.as_deref() {
        Some("DevicePtr" | "u64" | "i64" | "f64") => Ok(8),
        Some("u32" | "i32" | "f32") => Ok(4),
        _ => Err(syn::Error::new_spanned(
            of,
            "a parameter is a DevicePtr, u64, i64, f64, u32, i32 or f32; put anything else into one #[repr(C)] Pod struct, the only parameter",
        )),
    }
}

/// What the error of a clause shows: what the sides of a comparison came to, and each argument that any other clause looks at.
fn values_of(clause: &Expr, arguments: &[&Ident]) -> proc_macro2::TokenStream {
    if let Expr::Binary(b) = clause
        && is_comparison(&b.op)
    {
        let (left, right) = (&b.left, &b.right);
        return quote!(format!("{:?} against {:?}", #left, #right));
    }
    let mut leaves = Vec::new();
    collect_leaves(clause, arguments, &mut leaves);
    let mut seen = std::collections::HashSet::new();
    let pairs = leaves.into_iter().map(|leaf| (quote!(#leaf).to_string().replace(' ', ""), leaf));
    let shown = pairs.filter(|(text, _)| seen.insert(text.clone()));
    let parts: Vec<_> = shown.map(|(text, leaf)| quote!(format!("{} = {:?}", #text, #leaf))).collect();
    quote!([#(#parts),*].join(", "))
}

/// The arguments in an expression, or fields of them, in their order.
fn collect_leaves<'e>(expr: &'e Expr, arguments: &[&Ident], leaves: &mut Vec<&'e Expr>) {
    let mut all = |parts: &[&'e Expr]| parts.iter().for_each(|part| collect_leaves(part, arguments, leaves));
    match expr {
        Expr::Field(_) | Expr::Path(_) if is_argument(expr, arguments) => leaves.push(expr),
        Expr::Field(field) => all(&[&field.base]),
        Expr::Binary(b) => all(&[&b.left, &b.right]),
        Expr::Unary(u) => all(&[&u.expr]),
        Expr::Paren(p) => all(&[&p.expr]),
        Expr::Group(g) => all(&[&g.expr]),
        Expr::Cast(c) => all(&[&c.expr]),
        Expr::Reference(r) => all(&[&r.expr]),
        Expr::Index(i) => all(&[&i.expr, &i.index]),
        Expr::Call(call) => all(&call.args.iter().collect::<Vec<_>>()),
        Expr::MethodCall(call) => {
            all(&[&*call.receiver]);
            all(&call.args.iter().collect::<Vec<_>>());
        }
        _ => {}
    }
}

fn is_argument(expr: &Expr, arguments: &[&Ident]) -> bool {
    match expr {
        Expr::Field(field) => is_argument(&field.base, arguments),
        Expr::Path(path) => arguments.iter().any(|argument| path.path.is_ident(*argument)),
        _ => false,
    }
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
