//! `#[kernel]`: both sides of a kernel from one signature. `#[kernel_args]` and `#[device]` make
//! the structs that kernels take and the functions that kernels call.
//!
//! The crate `epoxide-simt` exports all of them, and documents them with examples. Their output
//! names that crate by paths from its root (`::epoxide_simt::..`), so any crate that depends on it
//! can use them, in any module.
//!
//! ```text
//! /// What it does.
//! #[kernel(threads = 256, grid = len.div_ceil(256), block = 256, requires(len >= 1))]
//! pub unsafe fn add_bias(data: Global<u32>, len: u32, bias: u32) { .. }
//! ```
//!
//! On the device this is the PTX entry `add_bias`, with a line that describes it. On the host it is
//! a type `AddBias` that implements `epoxide_simt::launch::Entry`. `AddBias::call(data, len, bias)`
//! checks every `requires` clause and returns a call that only fits this kernel.
//!
//! A kernel of one parameter takes it as it is: a struct of `#[kernel_args]`, which several kernels
//! can share. For several parameters, the attribute makes such a struct; they are `DevicePtr`,
//! `Global<T>` or numbers of 4 or 8 bytes.

#![forbid(unsafe_code)]

use proc_macro::TokenStream;
use proc_macro2::{Group, TokenStream as TokenStream2, TokenTree};
use quote::{ToTokens, format_ident, quote, quote_spanned};
use syn::ext::IdentExt as _;
use syn::parse::{Parse, ParseStream};
use syn::punctuated::Punctuated;
use syn::{
    AttrStyle, Attribute, BinOp, Expr, ExprCall, ExprPath, ExprRange, Fields, FnArg, Ident, ItemFn,
    ItemStruct, LitStr, Pat, PatIdent, RangeLimits, ReturnType, Signature, Token, Type, Visibility,
    parenthesized, parse_macro_input, parse_quote,
};

/// Arguments of `#[kernel]`.
const KEYS: &str = "expected threads, min_blocks, barriers, registers, traps, local_memory, grid, block, shared, \
                    dependent or requires(..)";

/// The attribute's arguments. Numbers are expressions, so that they can be constants with a name.
struct Contract {
    threads: Option<Expr>,
    min_blocks: Expr,
    barriers: Expr,
    registers: Expr,
    traps: Expr,
    /// One line, as it is in the PTX.
    local_memory: Option<String>,
    /// The shape of a launch, in terms of the arguments; `shared` also of `block`.
    grid: Option<Count>,
    block: Option<Count>,
    shared: Option<Expr>,
    dependent: bool,
    requires: Vec<Clause>,
}

impl Parse for Contract {
    fn parse(input: ParseStream) -> syn::Result<Self> {
        let mut contract = Contract {
            threads: None,
            min_blocks: parse_quote!(1),
            barriers: parse_quote!(0),
            registers: parse_quote!(255),
            traps: parse_quote!(0),
            local_memory: None,
            grid: None,
            block: None,
            shared: None,
            dependent: false,
            requires: Vec::new(),
        };
        let mut given = std::collections::HashSet::new();
        while !input.is_empty() {
            let key: Ident = input.parse()?;
            let name = key.to_string();
            if name != "requires" && !given.insert(name.clone()) {
                return Err(syn::Error::new(key.span(), format!("`{name}` is given twice: remove one")));
            }
            match name.as_str() {
                "requires" => {
                    let clauses = clauses(input)?.into_iter().map(Clause::new);
                    contract.requires.extend(clauses.collect::<syn::Result<Vec<_>>>()?);
                }
                "dependent" => contract.dependent = true,
                "grid" => contract.grid = Some(input.parse()?),
                "block" => contract.block = Some(input.parse()?),
                "threads" | "min_blocks" | "barriers" | "registers" | "traps" | "local_memory" | "shared" => {
                    input.parse::<Token![=]>()?;
                    match name.as_str() {
                        "threads" => contract.threads = Some(input.parse()?),
                        "min_blocks" => contract.min_blocks = input.parse()?,
                        "barriers" => contract.barriers = input.parse()?,
                        "registers" => contract.registers = input.parse()?,
                        "traps" => contract.traps = input.parse()?,
                        "local_memory" => {
                            let why = input.parse::<LitStr>()?.value();
                            contract.local_memory =
                                Some(why.split_whitespace().collect::<Vec<_>>().join(" "));
                        }
                        _ => contract.shared = Some(input.parse()?),
                    }
                }
                _ => return Err(syn::Error::new(key.span(), KEYS)),
            }
            if !input.is_empty() {
                input.parse::<Token![,]>()?;
            }
        }
        Ok(contract)
    }
}

/// A number of blocks or of threads: behind the name in the attribute.
enum Count {
    /// `= N`
    Exactly(Expr),
    /// `>= N`
    AtLeast(Expr),
}

impl Parse for Count {
    fn parse(input: ParseStream) -> syn::Result<Self> {
        if input.peek(Token![>=]) {
            input.parse::<Token![>=]>()?;
            return Ok(Count::AtLeast(input.parse()?));
        }
        input.parse::<Token![=]>()?;
        Ok(Count::Exactly(input.parse()?))
    }
}

/// A clause of a kernel's `requires(..)`.
enum Clause {
    /// A condition that must hold.
    Holds(Expr),
    /// `..Struct(args.field)`: the clauses of a struct of `#[kernel_args]`, and the value.
    Of(ExprPath, Expr),
}

impl Clause {
    fn new(clause: Expr) -> syn::Result<Self> {
        let Expr::Range(ExprRange { start: None, limits: RangeLimits::HalfOpen(_), end: Some(of), .. }) =
            clause
        else {
            return Ok(Clause::Holds(clause));
        };
        match *of {
            Expr::Call(ExprCall { func, mut args, .. }) if args.len() == 1 => match (*func, args.pop()) {
                (Expr::Path(path), Some(value)) => Ok(Clause::Of(path, value.into_value())),
                (func, _) => Err(syn::Error::new_spanned(func, "expected the name of a struct")),
            },
            of => Err(syn::Error::new_spanned(of, "expected ..Struct(args.field)")),
        }
    }

    /// Host: returns the error of a clause that does not hold.
    fn check(&self, kernel: &TokenStream2, arguments: &[&Ident]) -> TokenStream2 {
        match self {
            Clause::Holds(clause) => {
                let spelled = |text: String| quote!(::epoxide_simt::__private::String::from(#text));
                check(clause, kernel, arguments, &spelled)
            }
            Clause::Of(_, value) => {
                let path = quote!(#value).to_string();
                quote!(::epoxide_simt::launch::Contract::check(&#value, #kernel, #path)?;)
            }
        }
    }

    /// Device: lets the compiler build on it. The host has checked it before the launch. For one,
    /// divisions by a clause's non-zero value need no trap.
    fn assume(&self) -> TokenStream2 {
        match self {
            Clause::Holds(clause) => quote!(::core::hint::assert_unchecked(#clause);),
            Clause::Of(name, value) => quote!(#name! { #value }),
        }
    }
}

/// The clauses between parentheses.
fn clauses(input: ParseStream) -> syn::Result<Vec<Expr>> {
    let clauses;
    parenthesized!(clauses in input);
    Ok(Punctuated::<Expr, Token![,]>::parse_terminated(&clauses)?.into_iter().collect())
}

/// Returns code that reports a condition on `arguments` that does not hold. `spelled` makes a
/// `String` of text.
fn check(
    clause: &Expr,
    kernel: &TokenStream2,
    arguments: &[&Ident],
    spelled: &dyn Fn(String) -> TokenStream2,
) -> TokenStream2 {
    let text = spelled(quote!(#clause).to_string());
    let values = values_of(clause, arguments, spelled);
    quote! {
        if !(#clause) {
            return ::core::result::Result::Err(::epoxide_simt::launch::ContractError {
                kernel: #kernel, clause: #text, values: #values,
            });
        }
    }
}

/// Writes the PTX entry and the host's launcher of an `unsafe fn`. Parameters can be `mut`, and
/// levels of lints hold for the body.
///
/// | in the attribute | says | default |
/// |---|---|---|
/// | `threads = N` | the most threads of a block (`.maxntid`) | must be there |
/// | `grid = ..`, `block = ..`, `shared = ..` | the shape of a launch: blocks, threads of a block, bytes of dynamic shared memory of a block; `u32` expressions of the parameters, evaluated behind `requires`. `shared` may name `block`, the threads of the launch. A kernel that uses dynamic shared memory has `shared`, and `shared = 0` where the caller chooses | the caller chooses |
/// | `grid >= ..`, `block >= ..` | the least number; the caller chooses one | 1 |
/// | `requires(..)`, once or more | clauses over the parameters, beside those of the argument struct: checked before every launch, and assumed by the compiler. A product that can overflow is widened first, `a as u64 * b as u64 <= N` | none |
/// | `barriers = N` | block barriers (`barrier.sync`, `barrier.red`) in the finished PTX | 0 |
/// | `registers = N` | the most registers of a thread | 255 |
/// | `min_blocks = N` | blocks that must fit on one multiprocessor (`.minnctapersm`) | 1 |
/// | `dependent` | the first thing the kernel does is `griddepcontrol.wait` | it is not |
/// | `traps = N` | `trap` instructions that may be there | 0 |
/// | `local_memory = "why"` | the kernel may keep variables in local memory | it may not |
#[proc_macro_attribute]
pub fn kernel(attr: TokenStream, item: TokenStream) -> TokenStream {
    let attribute = TokenStream2::from(attr.clone());
    let contract = parse_macro_input!(attr as Contract);
    let function = parse_macro_input!(item as ItemFn);
    expand(attribute, contract, function).unwrap_or_else(syn::Error::into_compile_error).into()
}

/// Makes a struct that a kernel can take as its only parameter: `#[repr(C)]`, plain data, no
/// padding.
///
/// `#[kernel_args(requires(..))]` gives it clauses, which name fields by `self`. Each kernel that
/// takes the struct checks them before its own. A kernel whose struct has this one in a field has
/// `requires(..Name(args.field))`. Struct and kernels are in one crate.
#[proc_macro_attribute]
pub fn kernel_args(attr: TokenStream, item: TokenStream) -> TokenStream {
    let StructContract(requires) = parse_macro_input!(attr as StructContract);
    let item = parse_macro_input!(item as ItemStruct);
    if !matches!(item.fields, Fields::Named(_)) {
        return syn::Error::new_spanned(item, "name the fields").into_compile_error().into();
    }
    let plain = plain_data();
    let contract = struct_contract(&item, &requires);
    quote!(#plain #item #contract).into()
}

/// Arguments of `#[kernel_args]`.
struct StructContract(Vec<Expr>);

impl Parse for StructContract {
    fn parse(input: ParseStream) -> syn::Result<Self> {
        if input.is_empty() {
            return Ok(StructContract(Vec::new()));
        }
        let key: Ident = input.parse()?;
        if key != "requires" {
            return Err(syn::Error::new(key.span(), "expected requires(..)"));
        }
        Ok(StructContract(clauses(input)?))
    }
}

/// The clauses of a struct: for the host an implementation of `Contract`, for the device a macro
/// with the struct's name, so that whatever imports the struct imports the macro as well. The macro
/// inlines the assumptions. A function with all of them compiles to other code.
fn struct_contract(item: &ItemStruct, requires: &[Expr]) -> TokenStream2 {
    let name = &item.ident;
    let macro_name = format_ident!("__clauses_of_{name}");
    let this = format_ident!("self");
    let spelled = |text: String| quote!(::epoxide_simt::launch::spelled(#text, path));
    let checks = requires.iter().map(|clause| check(clause, &quote!(kernel), &[&this], &spelled));
    let names: Vec<_> = (0..requires.len()).map(|n| format_ident!("__clause_{n}")).collect();
    let fields = item.fields.iter().map(|field| {
        let (name, of) = (&field.ident, &field.ty);
        quote!(#name: #of)
    });
    let own = source_hash(requires.iter().map(|clause| quote!(#clause)).chain(fields));
    let nested = item.fields.iter().map(|field| {
        let (of, source) = (&field.ty, source_of(&field.ty));
        let conditions = field.attrs.iter().filter(|attribute| attribute.path().is_ident("cfg"));
        quote! {
            #(#conditions)*
            let source = ::epoxide_simt::__private::combined(
                source,
                ::epoxide_simt::__private::combined(::core::mem::size_of::<#of>() as u64, #source),
            );
        }
    });
    quote! {
        #[cfg(not(target_arch = "nvptx64"))]
        impl ::epoxide_simt::launch::Contract for #name {
            fn check(
                &self,
                kernel: &'static str,
                path: &str,
            ) -> ::core::result::Result<(), ::epoxide_simt::launch::ContractError> {
                let _ = (kernel, path);
                #(#checks)*
                ::core::result::Result::Ok(())
            }
        }

        #[allow(dead_code)]
        impl #name {
            #[doc(hidden)]
            pub const __SOURCE: u64 = {
                let source = #own;
                #(#nested)*
                source
            };
            #(
                #[doc(hidden)]
                #[inline(always)]
                pub fn #names(&self) -> bool {
                    #requires
                }
            )*
        }

        #[allow(unused_macros)]
        macro_rules! #macro_name {
            ($args:expr) => { #(::core::hint::assert_unchecked($args.#names());)* };
        }
        #[allow(unused_imports)]
        pub(crate) use #macro_name as #name;
    }
}

/// Makes a function that kernels call: always inlined, since PTX of the builder has no functions.
/// The body of an `unsafe fn` may do unsafe things without another block.
#[proc_macro_attribute]
pub fn device(attr: TokenStream, item: TokenStream) -> TokenStream {
    if !attr.is_empty() {
        let error = syn::Error::new_spanned(TokenStream2::from(attr), "device takes nothing");
        return error.into_compile_error().into();
    }
    let DeviceFn { attrs, vis, sig, body } = parse_macro_input!(item as DeviceFn);
    let body = match sig.unsafety {
        // SAFETY, in what it writes: the function's own safety section is the contract.
        Some(_) => quote!({
            #[allow(unused_unsafe)]
            // SAFETY: the caller upholds the function's documented requirements.
            unsafe #body
        }),
        None => quote!(#body),
    };
    quote! {
        #(#attrs)*
        #[cfg_attr(not(target_arch = "nvptx64"), allow(dead_code))]
        #[inline(always)]
        #vis #sig #body
    }
    .into()
}

/// A function whose body is kept as tokens. Parsing and printing could change tokens from a macro.
struct DeviceFn {
    attrs: Vec<Attribute>,
    vis: Visibility,
    sig: Signature,
    body: Group,
}

impl Parse for DeviceFn {
    fn parse(input: ParseStream) -> syn::Result<Self> {
        Ok(DeviceFn {
            attrs: input.call(Attribute::parse_outer)?,
            vis: input.parse()?,
            sig: input.parse()?,
            body: input.parse()?,
        })
    }
}

/// The first identifier of this name in `tokens`.
fn named(name: &str, tokens: TokenStream2) -> Option<Ident> {
    tokens.into_iter().find_map(|token| match token {
        TokenTree::Ident(ident) => Some(ident).filter(|ident| ident == name),
        TokenTree::Group(group) => named(name, group.stream()),
        _ => None,
    })
}

/// Attributes that make a struct plain data for host and device.
fn plain_data() -> TokenStream2 {
    quote! {
        #[derive(
            Clone, Copy, Debug,
            ::epoxide_simt::__private::bytemuck::Pod, ::epoxide_simt::__private::bytemuck::Zeroable,
        )]
        #[bytemuck(crate = "::epoxide_simt::__private::bytemuck")]
        #[repr(C)]
    }
}

fn expand(attribute: TokenStream2, contract: Contract, function: ItemFn) -> syn::Result<TokenStream2> {
    check_signature(&function.sig)?;
    let (docs, lints) = attributes(&function.attrs)?;
    let name = &function.sig.ident;
    // The symbol of an entry has no `r#`.
    let entry_name = name.unraw().to_string();
    let (body_name, type_name) = (format_ident!("{name}_body"), type_name(name, &entry_name)?);
    let block = &function.block;
    let named_parameters = function.sig.inputs.iter().map(parameter).collect::<syn::Result<Vec<_>>>()?;
    let parameters: Vec<_> = named_parameters.iter().map(|(pattern, of)| (&pattern.ident, *of)).collect();
    if function.sig.unsafety.is_none() {
        return Err(syn::Error::new_spanned(
            &function.sig,
            "a kernel trusts its addresses: write `unsafe fn`",
        ));
    }
    let Some(threads) = &contract.threads else {
        return Err(syn::Error::new_spanned(name, "a kernel names its most threads per block: threads = N"));
    };
    let block_parameter = parameters.iter().map(|(name, _)| *name).find(|name| *name == "block");
    if let (Some(shared), Some(parameter)) = (&contract.shared, block_parameter)
        && named("block", quote!(#shared)).is_some()
    {
        let error = "`block` in `shared` is the threads of the launch: give the parameter another name";
        return Err(syn::Error::new_spanned(parameter, error));
    }
    let Arguments { arg, arg_type, declaration, names, reserved } =
        arguments(&parameters, &type_name, &function.sig.inputs)?;
    let types: Vec<_> = match &names[..] {
        [] => vec![&arg_type],
        _ => parameters.iter().map(|(_, of)| *of).collect(),
    };
    // Parameters of a call, and the argument struct made of them: the reserved field is zero.
    let padding = reserved.then(|| quote!(__reserved: 0,));
    let (taken, made): (Vec<_>, _) = match &names[..] {
        [] => (vec![&arg], quote!(#arg)),
        names => (names.to_vec(), quote!(#arg_type { #(#names,)* #padding })),
    };
    let unpacked = if names.is_empty() { quote!() } else { quote!(let #arg_type { #(#names,)* .. } = #arg;) };
    // The body alone has parameters that it may change.
    let mut patterns = named_parameters.iter().map(|(pattern, _)| {
        let (mutability, name) = (&pattern.mutability, &pattern.ident);
        quote!(#mutability #name)
    });
    let (body_parameter, unpacked_in_body) = if names.is_empty() {
        (patterns.next(), quote!())
    } else {
        (Some(quote!(#arg)), quote!(let #arg_type { #(#patterns,)* .. } = #arg;))
    };
    // The clauses of a struct that kernels share come first.
    let of_struct = match (&names[..], &arg_type) {
        ([], Type::Path(of)) if size_of_type(&arg_type).is_err() => Some(Clause::Of(
            ExprPath { attrs: Vec::new(), qself: None, path: of.path.clone() },
            parse_quote!(#arg),
        )),
        _ => None,
    };
    let requires: Vec<_> = of_struct.iter().chain(&contract.requires).collect();
    let checks = requires.iter().map(|clause| clause.check(&quote!(#entry_name), &taken));
    let assumptions = requires.iter().map(|clause| clause.assume());
    let source = {
        let sig = &function.sig;
        let own = source_hash([attribute, quote!(#name), quote!(#sig), quote!(#block)]);
        let of_args = source_of(&arg_type);
        quote!(::epoxide_simt::__private::combined(#own, #of_args))
    };
    let Contract { min_blocks, barriers, registers, traps, local_memory, dependent, .. } = &contract;
    let [grid, block_threads] = [&contract.grid, &contract.block].map(|of| match of {
        Some(Count::Exactly(count)) => {
            quote!(::core::option::Option::Some(::epoxide_simt::launch::Count::Exactly(#count)))
        }
        Some(Count::AtLeast(count)) => {
            quote!(::core::option::Option::Some(::epoxide_simt::launch::Count::AtLeast(#count)))
        }
        None => quote!(::core::option::Option::None),
    });
    let shared_bytes = match &contract.shared {
        Some(bytes) => {
            // A macro that writes the kernel may have the expression from its caller, whose names
            // are others than those made here.
            let threads = named("block", quote!(#bytes)).unwrap_or_else(|| format_ident!("block"));
            quote! {{
                #[allow(unused_variables)]
                let bytes: fn(&#arg_type, u32) -> u32 = |__arguments: &#arg_type, #threads: u32| {
                    let #arg = *__arguments;
                    #unpacked
                    #bytes
                };
                ::core::option::Option::Some(bytes)
            }}
        }
        None => quote!(::core::option::Option::None),
    };
    // Before everything else, so that a launch may rely on it.
    let wait = dependent.then(|| quote! { ::epoxide_simt::griddepcontrol_wait(); });
    let allowed = match local_memory {
        Some(why) => quote!(::core::option::Option::Some(#why)),
        None => quote!(::core::option::Option::None),
    };
    // A comment at module scope of the PTX, whose values are constants of the kernel's crate.
    let template = description(&entry_name, &arg.to_string(), &contract);
    let describe = quote! {
        ::core::arch::global_asm!(
            #template, const #threads, const #min_blocks, const #barriers, const #registers, const #traps,
            const #source, const ::core::mem::size_of::<#arg_type>(), const ::core::mem::align_of::<#arg_type>()
        );
    };
    // Every token is where the kernel's name is: PTX names that place, also where a macro writes the
    // kernel.
    let entry = |abi: &str, attribute: TokenStream2| {
        let abi = LitStr::new(abi, name.span());
        quote_spanned! {name.span()=>
            #describe
            #[unsafe(no_mangle)]
            #attribute
            unsafe extern #abi fn #name(#arg: #arg_type) {
                // SAFETY: the launcher vouches for the addresses.
                unsafe { #body_name(#arg) }
            }
        }
    };
    let (entry, nvvm_entry) = (entry("ptx-kernel", quote!()), entry("C", quote!(#[nvvm_internal::kernel()])));

    Ok(quote! {
        #declaration

        #(#docs)*
        ///
        /// # Safety
        /// The addresses in the argument struct are live and as its fields say.
        #[cfg_attr(not(target_arch = "nvptx64"), allow(dead_code))]
        #(#lints)*
        #[inline(always)]
        unsafe fn #body_name(#body_parameter: #arg_type) {
            // SAFETY: the caller vouches for the addresses; the head of the kernel's file explains
            // why its use of them is sound.
            unsafe {
                #wait
                #unpacked_in_body
                #(#assumptions)*
                #block
            }
        }

        // Nothing on the host. epoxide-simt selects the entry for the back end that compiles.
        ::epoxide_simt::__entry! {
            { #entry }
            { #nvvm_entry }
        }

        #(#docs)*
        #[cfg(not(target_arch = "nvptx64"))]
        #[derive(Clone, Copy, Debug)]
        pub struct #type_name;

        // SAFETY: the entry above takes this struct, and only `call` below makes calls.
        #[cfg(not(target_arch = "nvptx64"))]
        unsafe impl ::epoxide_simt::launch::Entry for #type_name {
            type Args = #arg_type;
            const INFO: ::epoxide_simt::launch::KernelInfo = ::epoxide_simt::launch::KernelInfo {
                name: #entry_name,
                params: &[::epoxide_simt::launch::ParamLayout {
                    name: stringify!(#arg),
                    size: ::core::mem::size_of::<#arg_type>(),
                    align: ::core::mem::align_of::<#arg_type>(),
                }],
                max_threads: #threads,
                min_blocks_per_sm: #min_blocks,
                barriers: #barriers,
                max_registers: #registers,
                dependent: #dependent,
                local_depot_allowed: #allowed,
                traps_allowed: #traps,
                source: #source,
            };
        }

        #[cfg(not(target_arch = "nvptx64"))]
        impl #type_name {
            /// Requirements of its PTX.
            pub const INFO: ::epoxide_simt::launch::KernelInfo =
                <Self as ::epoxide_simt::launch::Entry>::INFO;

            /// Checks the clauses, and gives the call for a launch.
            ///
            /// # Errors
            /// The clause that does not hold, with its values.
            #[allow(clippy::too_many_arguments)]
            pub fn call(
                #(#taken: #types),*
            ) -> ::core::result::Result<
                ::epoxide_simt::launch::Call<Self>, ::epoxide_simt::launch::ContractError,
            > {
                #(#checks)*
                // No variable between the parameters and the expressions that name them.
                // SAFETY: every clause has been checked.
                ::core::result::Result::Ok(unsafe {
                    ::epoxide_simt::launch::Call::checked(#made, ::epoxide_simt::launch::Named {
                        grid: #grid, block: #block_threads, shared_bytes: #shared_bytes,
                    })
                })
            }
        }
    })
}

/// The line that describes a kernel, as a template whose values are constants of the kernel's
/// crate. On the host, `KernelInfo` prints the same line, but for `shared=0` of a kernel whose
/// attribute has no `shared`: `cargo build-ptx` checks the kernel against it, and removes it.
fn description(name: &str, arg: &str, contract: &Contract) -> String {
    let shared = if contract.shared.is_some() { "" } else { " shared=0" };
    let local = contract
        .local_memory
        .as_ref()
        .map_or(String::new(), |why| format!(" local={}", why.replace('{', "{{").replace('}', "}}")));
    format!(
        "// kernel {name}: threads={{}} min_blocks={{}} barriers={{}} registers={{}} traps={{}} dependent={}\
         {shared} source={{}} params={arg}:{{}}:{{}}{local}",
        u32::from(contract.dependent)
    )
}

/// A constant that differs where structs of `#[kernel_args]` in a type have other fields or
/// clauses. The inherent constant of such a struct goes before that of the trait, which all types
/// have.
fn source_of(of: &Type) -> TokenStream2 {
    match of {
        Type::Array(array) => source_of(&array.elem),
        Type::Group(group) => source_of(&group.elem),
        Type::Paren(paren) => source_of(&paren.elem),
        _ => quote! {{
            #[allow(unused_imports)]
            use ::epoxide_simt::__private::Source as _;
            <#of>::__SOURCE
        }},
    }
}

/// A hash (FNV-1a) of tokens that no white space and no comment changes.
fn source_hash(parts: impl IntoIterator<Item = TokenStream2>) -> u64 {
    fn absorb(hash: &mut u64, text: &str) {
        for byte in text.bytes().chain([0]) {
            *hash = (*hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    fn walk(hash: &mut u64, tokens: TokenStream2) {
        for token in tokens {
            match token {
                TokenTree::Group(group) => {
                    absorb(hash, &format!("{:?}", group.delimiter()));
                    walk(hash, group.stream());
                    absorb(hash, "end");
                }
                TokenTree::Punct(punct) => absorb(hash, &punct.as_char().to_string()),
                TokenTree::Ident(ident) => absorb(hash, &ident.to_string()),
                TokenTree::Literal(literal) => absorb(hash, &literal.to_string()),
            }
        }
    }
    let mut hash = 0xcbf2_9ce4_8422_2325;
    for part in parts {
        walk(&mut hash, part);
        absorb(&mut hash, "part");
    }
    hash
}

/// A parameter's name, which can be `mut`, and its type.
fn parameter(input: &FnArg) -> syn::Result<(&PatIdent, &Type)> {
    let FnArg::Typed(argument) = input else {
        return Err(syn::Error::new_spanned(input, "a kernel has no self"));
    };
    if let Some(attribute) = argument.attrs.first() {
        return Err(syn::Error::new_spanned(attribute, "a kernel's parameters have no attributes"));
    }
    match &*argument.pat {
        Pat::Ident(name) if name.by_ref.is_none() && name.subpat.is_none() => Ok((name, &argument.ty)),
        Pat::Ident(pattern) => {
            Err(syn::Error::new_spanned(pattern, "a kernel's parameter is a name, or `mut` and a name"))
        }
        pattern => Err(syn::Error::new_spanned(pattern, "name the parameter")),
    }
}

/// Rejects parts of a signature that an entry of PTX cannot have.
fn check_signature(signature: &Signature) -> syn::Result<()> {
    let error = |part: &dyn ToTokens, text: &str| Err(syn::Error::new_spanned(part.to_token_stream(), text));
    let Signature { constness, asyncness, abi, generics, variadic, output, .. } = signature;
    if let Some(part) = constness {
        return error(part, "a kernel is not `const`: a launch runs it");
    }
    if let Some(part) = asyncness {
        return error(part, "a kernel is not `async`: each launch is asynchronous");
    }
    if let Some(part) = abi {
        return error(part, "a kernel names no ABI: `#[kernel]` gives it that of PTX entries");
    }
    if !generics.params.is_empty() {
        let text = "a kernel has no generics, because its entry has one name: put the code into a generic \
                    `#[device]` function, which one kernel for each type or number calls";
        return error(&generics.params, text);
    }
    if let Some(part) = &generics.where_clause {
        return error(part, "a kernel has no `where`, because it has no generics");
    }
    if let Some(part) = variadic {
        return error(part, "a kernel's parameters are all named");
    }
    match output {
        ReturnType::Default => Ok(()),
        ReturnType::Type(..) => {
            error(output, "a kernel returns nothing: store results to an array that it takes")
        }
    }
}

/// The attributes of a kernel: documentation, and levels of lints and settings of tools, which
/// belong to its body. Any other one would have no effect.
fn attributes(all: &[Attribute]) -> syn::Result<(Vec<&Attribute>, Vec<Attribute>)> {
    const LEVELS: [&str; 5] = ["allow", "expect", "warn", "deny", "forbid"];
    const TOOLS: [&str; 2] = ["clippy", "rustfmt"];
    let (mut docs, mut lints) = (Vec::new(), Vec::new());
    for attribute in all {
        let path = attribute.path();
        let tool = path.segments.first().filter(|_| path.segments.len() > 1);
        if path.is_ident("doc") {
            docs.push(attribute);
        } else if LEVELS.iter().any(|level| path.is_ident(level))
            || tool.is_some_and(|tool| TOOLS.iter().any(|name| tool.ident == name))
        {
            lints.push(Attribute { style: AttrStyle::Outer, ..attribute.clone() });
        } else {
            let remedy = if path.is_ident("cfg") || path.is_ident("cfg_attr") {
                "put it in front of `#[kernel]`"
            } else {
                "a kernel has documentation and levels of lints alone"
            };
            let text = format!("`#[{}]` would have no effect here: {remedy}", path.to_token_stream());
            return Err(syn::Error::new_spanned(attribute, text));
        }
    }
    Ok((docs, lints))
}

/// The one struct that a kernel takes.
struct Arguments<'f> {
    arg: Ident,
    arg_type: Type,
    /// The struct's declaration and the kernel's parameters, where the attribute makes the struct.
    declaration: TokenStream2,
    names: Vec<&'f Ident>,
    /// Whether that struct ends with a reserved field.
    reserved: bool,
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
            reserved: false,
        }),
        several => {
            let struct_name = format_ident!("{type_name}Args");
            let sizes = several.iter().map(|(_, of)| size_of_type(of)).collect::<syn::Result<Vec<_>>>()?;
            // The large ones first, so that there is no padding between them; padding at the end is
            // an explicit field.
            let of_size =
                |size| several.iter().zip(&sizes).filter(move |(_, is)| **is == size).map(|(one, _)| one);
            let fields = of_size(8).chain(of_size(4)).map(|(name, of)| quote!(#name: #of));
            let odd = of_size(8).next().is_some() && of_size(4).count() % 2 == 1;
            let reserved = odd.then(|| quote!(__reserved: u32,));
            let (text, plain) = (format!("Arguments of `{type_name}`."), plain_data());
            Ok(Arguments {
                arg: format_ident!("args"),
                arg_type: syn::parse_quote!(#struct_name),
                declaration: quote! {
                    #[doc = #text]
                    #[doc(hidden)]
                    #plain
                    pub struct #struct_name { #(#fields,)* #reserved }
                },
                names: several.iter().map(|(name, _)| *name).collect(),
                reserved: odd,
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
        Some("DevicePtr" | "Global" | "u64" | "i64" | "f64") => Ok(8),
        Some("u32" | "i32" | "f32") => Ok(4),
        _ => Err(syn::Error::new_spanned(
            of,
            "a parameter is a DevicePtr, Global<T>, u64, i64, f64, u32, i32 or f32; put anything else into one #[kernel_args] struct, the only parameter",
        )),
    }
}

/// Values for the error of a clause: both sides of a comparison, or each argument in any other
/// clause. `spelled` makes a `String` of an argument's text.
fn values_of(clause: &Expr, arguments: &[&Ident], spelled: &dyn Fn(String) -> TokenStream2) -> TokenStream2 {
    if let Expr::Binary(b) = clause
        && is_comparison(&b.op)
    {
        let (left, right) = (&b.left, &b.right);
        return quote!(::epoxide_simt::__private::format!("{:?} against {:?}", #left, #right));
    }
    let mut leaves = Vec::new();
    collect_leaves(clause, arguments, &mut leaves);
    let mut seen = std::collections::HashSet::new();
    let pairs = leaves.into_iter().map(|leaf| (quote!(#leaf).to_string().replace(' ', ""), leaf));
    let shown = pairs.filter(|(text, _)| seen.insert(text.clone()));
    let parts: Vec<_> = shown
        .map(|(text, leaf)| {
            let text = spelled(text);
            quote!(::epoxide_simt::__private::format!("{} = {:?}", #text, #leaf))
        })
        .collect();
    quote! {{
        let parts: &[::epoxide_simt::__private::String] = &[#(#parts),*];
        parts.join(", ")
    }}
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

/// The name of the host's type of a kernel.
fn type_name(kernel: &Ident, entry_name: &str) -> syn::Result<Ident> {
    let name = camel_case(entry_name);
    // Parsed, since neither digits nor a reserved word are a name.
    match syn::parse_str::<Ident>(&name) {
        Ok(_) => Ok(format_ident!("{name}")),
        Err(_) => {
            let text = format!(
                "kernel `{entry_name}` would have the type `{name}`, which is no name: begin it with a \
                 letter, and let it be no reserved word"
            );
            Err(syn::Error::new_spanned(kernel, text))
        }
    }
}

fn camel_case(name: &str) -> String {
    name.split('_')
        .flat_map(|word| {
            let mut chars = word.chars();
            chars.next().map(|c| c.to_uppercase().collect::<String>() + chars.as_str())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_by_block_and_a_parameter_block_exclude_each_other() {
        let error = |shared: &str| {
            let attribute: TokenStream2 = format!("threads = 32, shared = {shared}").parse().unwrap();
            let function = parse_quote!(
                unsafe fn k(data: Global<u32>, block: u32) {}
            );
            let contract = syn::parse2(attribute.clone()).unwrap_or_else(|error| panic!("{error}"));
            expand(attribute, contract, function).err().map(|error| error.to_string())
        };
        assert_eq!(error("4 * 32"), None);
        assert!(error("4 * block").is_some_and(|text| text.contains("give the parameter another name")));
    }

    /// The output of `#[kernel(threads = 32)]` for a function, or the text of its error.
    fn expanded(function: &str) -> Result<String, String> {
        let attribute: TokenStream2 = quote!(threads = 32);
        let contract = syn::parse2(attribute.clone()).map_err(|error| error.to_string())?;
        let function = syn::parse_str(function).map_err(|error| error.to_string())?;
        let output = expand(attribute, contract, function).map_err(|error| error.to_string())?;
        Ok(output.to_string())
    }

    #[test]
    fn parameters_can_be_mut_in_the_body() {
        let several = expanded("unsafe fn k(data: Global<u32>, mut len: u32) { len += 1; }").unwrap();
        assert!(several.contains("let KArgs { data , mut len , .. } = args"), "{several}");
        assert_eq!(several.matches("mut ").count(), 1, "{several}");
        let one = expanded("unsafe fn k(mut args: Rows) { args.len += 1; }").unwrap();
        assert!(one.contains("fn k_body (mut args : Rows)"), "{one}");
        assert_eq!(one.matches("mut ").count(), 1, "{one}");
    }

    #[test]
    fn parts_of_a_signature_that_have_no_meaning_are_errors() {
        for (function, cause) in [
            ("unsafe fn k(x: u32) -> u32 { x }", "returns nothing"),
            ("unsafe fn k<const N: u32>(x: u32) {}", "generic `#[device]` function"),
            ("unsafe fn k<T>(x: u32) where T: Copy {}", "generic `#[device]` function"),
            ("unsafe fn k(x: u32) where u32: Copy {}", "no `where`"),
            ("const unsafe fn k(x: u32) {}", "not `const`"),
            ("async unsafe fn k(x: u32) {}", "not `async`"),
            ("unsafe extern \"C\" fn k(x: u32) {}", "names no ABI"),
            ("unsafe fn k(ref x: u32) {}", "`mut` and a name"),
            ("unsafe fn k(x @ 1..: u32) {}", "`mut` and a name"),
            ("unsafe fn k((x, y): Pair) {}", "name the parameter"),
            ("unsafe fn k(#[cfg(a)] x: u32) {}", "parameters have no attributes"),
            ("#[deprecated] unsafe fn k(x: u32) {}", "`#[deprecated]` would have no effect"),
            ("#[cfg(a)] unsafe fn k(x: u32) {}", "in front of `#[kernel]`"),
        ] {
            let error = expanded(function).expect_err(function);
            assert!(error.contains(cause), "{function}: {error}");
        }
    }

    #[test]
    fn a_name_without_a_type_is_an_error_and_a_raw_one_is_none() {
        for (name, of) in [("_2d", "`2d`"), ("__", "``"), ("self_", "`Self`")] {
            let error = expanded(&format!("unsafe fn {name}(x: u32) {{}}")).expect_err(name);
            assert!(error.contains(&format!("`{name}`")) && error.contains(of), "{error}");
            assert!(error.contains("begin it with a letter"), "{error}");
        }
        let raw = expanded("unsafe fn r#match(x: u32) {}").unwrap();
        assert!(raw.contains("pub struct Match"), "{raw}");
        assert!(raw.contains("fn r#match (") && raw.contains("// kernel match: "), "{raw}");
        // The symbol of the entry has no `r#`.
        assert!(raw.contains("name : \"match\"") && !raw.contains("stringify ! (r#match)"), "{raw}");
    }

    #[test]
    fn levels_of_lints_hold_for_the_body() {
        let text = expanded(
            "#[allow(unused_variables)] #[expect(clippy::eq_op)] #[rustfmt::skip] unsafe fn k(x: u32) {}",
        );
        let text = text.unwrap();
        let body = "# [allow (unused_variables)] # [expect (clippy :: eq_op)] # [rustfmt :: skip] # [inline (always)] \
                    unsafe fn k_body";
        assert!(text.contains(body), "{text}");
    }

    #[test]
    fn clauses_add_up_and_other_keys_are_given_once() {
        let contract = syn::parse_str::<Contract>("threads = 32, requires(a, b), requires(c)");
        assert_eq!(contract.map_or(0, |contract| contract.requires.len()), 3);
        for key in ["threads = 32", "grid = 1", "block >= 1", "shared = 4", "dependent", "traps = 1"] {
            let error = syn::parse_str::<Contract>(&format!("{key}, {key}")).err().map(|e| e.to_string());
            let name = key.split(' ').next().unwrap();
            assert_eq!(error, Some(format!("`{name}` is given twice: remove one")));
        }
    }
}
